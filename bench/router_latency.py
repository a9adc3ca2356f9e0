"""Measures the latency that a separate engine process adds for one client: calls of one token with a shard
that replies at once, and the time between the tokens of a stream with a shard as slow as a model."""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.api_clients import GRPC
from bench.apis import RandomTokens, running
from bench.contest import Spread, turns
from bench.generator import Generator, closed_loop, load_processes
from bench.report import format_table
from tgis.load.workload.conversations import Workload

ONE, SPLIT = "one process", "engine + 1 worker"
NUM_WORKERS = {ONE: 0, SPLIT: 1}
NUM_CALLS, NEW_TOKENS = 50, 100  # of a round
GOAL_MS = 0.5
TEXTS = ("The quick brown fox",)


@dataclass(frozen=True)
class Latency:
    """Median of a round, in milliseconds."""

    router: str
    round: int
    call_ms: float
    token_ms: float


def measure(options: argparse.Namespace) -> str:
    """Measure one router. Raises BenchError."""
    with ExitStack() as stack:
        routers = {name: _start(stack, num_workers) for name, num_workers in NUM_WORKERS.items()}
        for name, router in routers.items():
            router.measure(name, 0)
        latencies = []
        for number in range(options.rounds):
            latencies += [routers[name].measure(name, number) for name in turns(list(routers), number)]
            print(*latencies[-2:], file=sys.stderr, flush=True)
    return format_latencies(latencies)


class _Router:
    def __init__(self, tokens: RandomTokens, generator: Generator, target: str) -> None:
        self._tokens, self._generator, self._target = tokens, generator, target

    def measure(self, name: str, number: int) -> Latency:
        """Measure all routers. Raises BenchError."""
        self._tokens.is_fast = True
        call = Workload(texts=TEXTS, output_tokens="1", unary_share=1.0)
        job = closed_loop(self._target, call, clients=1, num_conversations=NUM_CALLS, warm_up=1)
        call_s = statistics.median(answer.total_s for answer in self._generator.answers(job))
        self._tokens.is_fast = False
        long = Workload(texts=TEXTS, output_tokens=str(NEW_TOKENS))
        [stream] = self._generator.answers(closed_loop(self._target, long, clients=1))
        pauses = [after - before for before, after in pairwise(stream.arrivals)]
        return Latency(name, number, 1e3 * call_s, 1e3 * statistics.median(pauses))


def _start(stack: ExitStack, num_workers: int) -> _Router:
    directory, tokens = stack.enter_context(tempfile.TemporaryDirectory(prefix="latency-")), RandomTokens()
    tokens.watch(0, 0)  # steps do not wait for further streams
    bench = stack.enter_context(running(Path(directory), 8, [GRPC], tokens, None, num_workers))
    return _Router(tokens, stack.enter_context(load_processes()), bench.router.grpc_target)


def format_latencies(latencies: Sequence[Latency]) -> str:
    """Return a Markdown table of medians. The split's cost is computed per round."""
    calls = {name: [each.call_ms for each in latencies if each.router == name] for name in NUM_WORKERS}
    tokens = {name: [each.token_ms for each in latencies if each.router == name] for name in NUM_WORKERS}
    rows = []
    for title, values in (("call of one token", calls), ("between tokens of a stream", tokens)):
        added = [split - one for one, split in zip(values[ONE], values[SPLIT], strict=True)]
        cells = (f"{Spread.of(each):.2f}" for each in (values[ONE], values[SPLIT], added))
        rows.append([title, *cells, f"<= {GOAL_MS}"])
    return format_table(["ms", ONE, SPLIT, "added", "target"], rows)
