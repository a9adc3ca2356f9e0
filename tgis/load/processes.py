"""Starts load processes, gives them jobs, and collects what they have recorded."""

import asyncio
import json
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tgis.load.errors import LoadError
from tgis.load.job import LoadJob
from tgis.load.records import AnswerRecord
from tgis.load.worker import MODULE

LINE_BYTES = 1 << 30  # maximum size of a process's records
HEAD_START_S = 0.1  # time between the order and the start, for all processes to read it
Listener = Callable[[dict[str, Any]], None]


@dataclass
class RunRecord:
    """Records of the processes of one run."""

    records: list[AnswerRecord]
    cpu_shares: list[float]
    """Share of a core that each process used."""
    delays: list[float]
    """Delays of the processes' event loops."""
    elapsed_s: float
    cpu_s: list[float] = field(default_factory=list)
    """CPU time of each process."""


class LoadProcesses:
    """Load processes of a measurement, in an `async with` block."""

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._processes: list[Process] = []

    async def __aenter__(self) -> "LoadProcesses":
        for _ in range(self._num_processes):
            command = [sys.executable, "-m", MODULE]
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, limit=LINE_BYTES
            )
            self._processes.append(process)
        return self

    async def __aexit__(self, *raised: object) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()

    def stop(self) -> None:
        """Let the current run end as soon as its open requests have ended."""
        for process in self._processes:
            if process.returncode is None:
                process.send_signal(signal.SIGUSR1)

    async def run(
        self, jobs: Sequence[LoadJob], listen: Listener, begin: Callable[[float], None] | None = None
    ) -> RunRecord:
        """Run jobs, at most one per process, with the same start. Raises LoadError.

        `begin` is called with the start, a time of the monotonic clock, shortly before it."""
        used = self._processes[: len(jobs)]
        for process, job in zip(used, jobs, strict=True):
            _send(process, job.to_json())
        for process in used:
            await _receive(process, "ready", listen)
        start = time.monotonic() + HEAD_START_S
        if begin is not None:
            begin(start)
        for process in used:
            _send(process, {"start": start})
        results = await asyncio.gather(*(_receive(process, "records", listen) for process in used))
        return RunRecord(
            records=[AnswerRecord(**fields) for result in results for fields in result["records"]],
            cpu_shares=[result["cpu_share"] for result in results],
            delays=[delay for result in results for delay in result["delays"]],
            elapsed_s=max(result["elapsed_s"] for result in results),
            cpu_s=[result["cpu_s"] for result in results],
        )


def _send(process: Process, fields: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(fields).encode() + b"\n")


async def _receive(process: Process, name: str, listen: Listener) -> dict[str, Any]:
    """Return the next line with the name. Progress goes to the listener."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        fields: dict[str, Any] = json.loads(line)
        if "error" in fields:
            raise LoadError(fields["error"])
        if name in fields:
            return fields
        listen(fields)
    raise LoadError(f"a load process ended with status {await process.wait()}")
