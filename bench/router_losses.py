"""Measures the effect on streams of router workers when the engine process is killed."""

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

from bench.contest import Spread
from bench.generator import Generator, closed_loop, load_processes
from bench.report import format_table
from bench.router_group import RouterService
from bench.service import BenchError
from tests.support.router.fake_shard import FakeShard, ShardServer
from tests.support.router.router_process import router_command
from tests.support.tokenizers.trained import write_byte_level
from tgis.load.records import AnswerRecord
from tgis.load.workload.conversations import Workload
from tgis.pb import shard_pb2 as pb

NUM_WORKERS, NUM_STREAMS, NUM_KILLS = 3, 64, 3
NEW_TOKENS, KILL_AFTER_S, STEP_S = 160, 1.5, 0.02
VOCAB_SIZE, BLOCK_SIZE, MAX_LENGTH = 400, 16, 512
PAUSE_GOAL_S = 3.0


class Streams:
    """Router workers in front of a fake shard whose tokens depend on all tokens before them."""

    def __init__(self, router: RouterService, generator: Generator) -> None:
        self._router, self._generator = router, generator

    def stream(self) -> list[AnswerRecord]:
        """Run the streams, whose texts are the same in each run. Raises BenchError."""
        texts = tuple(f"The quick brown fox {index}" for index in range(NUM_STREAMS))
        workload = Workload(texts=texts, output_tokens=str(NEW_TOKENS))
        return self._generator.answers(closed_loop(self._router.grpc_target, workload, NUM_STREAMS))

    def stream_with_loss(self) -> list[AnswerRecord]:
        """Kill the engine process during the streams. Raises BenchError."""
        engine = self._router.engine
        assert engine is not None, "the engine runs in a process of its own"
        killer = threading.Timer(KILL_AFTER_S, os.kill, (engine, signal.SIGKILL))
        killer.start()
        try:
            return self.stream()
        finally:
            killer.cancel()
            killer.join()
            if self._router.engine == engine:
                raise BenchError("the streams ended before the engine process was killed")


@contextmanager
def running(directory: Path) -> Iterator[Streams]:
    write_byte_level(directory, VOCAB_SIZE)
    uds_path, num_blocks = str(directory / "shard"), NUM_STREAMS * MAX_LENGTH // BLOCK_SIZE
    info = pb.InfoResponse(num_blocks=num_blocks, block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE)
    shard = FakeShard(info=info)
    shard.step_s = STEP_S
    with ExitStack() as stack:
        stack.callback(ShardServer(shard, uds_path).stop)
        flags = ["--max-batch-size", str(NUM_STREAMS), "--max-concurrent-requests", str(NUM_STREAMS)]
        flags += ["--max-sequence-length", str(MAX_LENGTH), "--shard-uds-path", uds_path]
        router = RouterService(router_command(directory, *flags), NUM_WORKERS)
        stack.callback(router.end)
        router.service.wait_until_serving()
        yield Streams(router, stack.enter_context(load_processes()))


def measure(options: argparse.Namespace) -> str:
    """Measure the losses. Raises BenchError. Each loss uses new processes, because the launcher delays
    repeated restarts."""
    whole, lost = list[list[str | None]](), list[list[AnswerRecord]]()
    for _ in range(NUM_KILLS):
        with tempfile.TemporaryDirectory(prefix="router-losses-") as directory:
            with running(Path(directory)) as streams:
                whole.append([stream.digest for stream in streams.stream()])
                lost.append(streams.stream_with_loss())
                print(_pauses(lost[-1]), file=sys.stderr, flush=True)
    return format_losses(whole, lost)


def _pauses(streams: Sequence[AnswerRecord]) -> Spread:
    """Return the longest time between two messages of each stream."""
    return Spread.of(
        [max(after - before for before, after in pairwise(stream.arrivals)) for stream in streams]
    )


def format_losses(whole: Sequence[Sequence[str | None]], lost: Sequence[Sequence[AnswerRecord]]) -> str:
    """Return a Markdown table of the losses, given the digests of the texts of an undisturbed run."""
    rows = []
    for number, (texts, streams) in enumerate(zip(whole, lost, strict=True), 1):
        pauses = _pauses(streams)
        num_wrong = sum(stream.digest != text for stream, text in zip(streams, texts, strict=True))
        cells = (f"{pauses.high:.2f}", f"{pauses.median:.2f}", str(num_wrong))
        rows.append([str(number), str(len(streams)), *cells])
    table = format_table(["kill", "streams", "longest pause, s", "median, s", "texts that differ"], rows)
    return f"{table}\n\nTargets: longest pause <= {PAUSE_GOAL_S:g} s, no text differs."
