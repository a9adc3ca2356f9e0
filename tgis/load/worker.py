"""Load process: reads a job and the start of its run from stdin as JSON lines, and writes records to stdout.

It serves one job after the other, until stdin ends. SIGUSR1 ends a run early: nothing further is sent."""

import asyncio
import contextlib
import gc
import json
import signal
import sys
import time
from collections.abc import Awaitable
from dataclasses import asdict
from typing import Any

import uvloop

from tgis.load.apis.catalogue import APIS
from tgis.load.errors import AnswerError, LoadError
from tgis.load.job import LoadJob
from tgis.load.loops import LoadRun
from tgis.load.records import AnswerRecord, RunClock
from tgis.load.workload.conversations import ConversationSource

MODULE = "tgis.load.worker"
LOOK_S = 0.05  # time between two looks at the event loop's delay
LOOKS_PER_REPORT = 10


class LoopDelays:
    """Delays of the event loop, and the reports to the parent, which are made at the same looks."""

    def __init__(self, run: LoadRun) -> None:
        self._run = run
        self.delays: list[float] = []

    async def watch(self) -> None:
        num_reported = 0
        while True:
            due = time.monotonic() + LOOK_S
            await asyncio.sleep(LOOK_S)
            self.delays.append(time.monotonic() - due)
            if len(self.delays) % LOOKS_PER_REPORT == 0:
                new = self._run.records[num_reported:]
                num_reported += len(new)
                _write({"progress": _summarize(new), "open": self._run.num_open})


def _summarize(records: list[AnswerRecord]) -> dict[str, Any]:
    return {
        "done": len(records),
        "failed": sum(record.error is not None for record in records),
        "tokens": sum(record.output_tokens for record in records),
        "first": [record.first_token_s for record in records if record.first_token_s is not None],
        "token": [record.token_s for record in records if record.token_s is not None],
    }


async def _serve(job: LoadJob) -> None:
    client = APIS[job.api](job.target)
    try:
        run = LoadRun(job, client, ConversationSource(job.workload, job.scale))
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, run.stop)
        try:
            await client.open()
        except AnswerError as error:
            raise LoadError(f"{job.target.address} cannot be reached: {error.kind}") from error
        await run.warm_up()
        _write({"ready": True})
        order = json.loads(await asyncio.to_thread(sys.stdin.readline) or "null")
        if order is not None:
            await _measure(run, RunClock(order["start"]))
    finally:
        await client.close()


async def _measure(run: LoadRun, clock: RunClock) -> None:
    looks = LoopDelays(run)
    begin, used = time.monotonic(), time.process_time()
    await _beside(run.run(clock), looks.watch())
    wall, used = time.monotonic() - begin, time.process_time() - used
    _write(
        {
            "records": [asdict(record) for record in run.records],
            "cpu_share": used / wall if wall else 0.0,
            "cpu_s": used,
            "delays": looks.delays,
            "elapsed_s": clock(),
        }
    )


async def _beside(work: Awaitable[None], other: Awaitable[None]) -> None:
    """Wait for `work`, with `other` running beside it."""
    task = asyncio.ensure_future(other)
    try:
        await work
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _write(fields: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is a run
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while line := sys.stdin.readline():
            try:
                runner.run(_serve(LoadJob.from_json(json.loads(line))))
            except LoadError as error:
                _write({"error": str(error)})
            gc.collect()  # errors of calls, whose cycles keep gRPC's connections open


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
