"""Measures the latency that a separate engine process adds for one client: calls of one token with a shard
that replies at once, and the time between the tokens of a stream with a shard as slow as a model."""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench import timed_clients, worker
from bench.api_clients import GRPC
from bench.apis import RandomTokens, running
from bench.contest import Spread, turns
from bench.report import format_table
from bench.timed_clients import ask_streams, ask_unary

ONE, SPLIT = "one process", "engine + 1 worker"
NUM_WORKERS = {ONE: 0, SPLIT: 1}
NUM_CALLS, NEW_TOKENS = 50, 100  # of a round
GOAL_MS = 0.5


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
    def __init__(self, tokens: RandomTokens, clients: worker.Worker) -> None:
        self._tokens, self._clients = tokens, clients

    def measure(self, name: str, number: int) -> Latency:
        """Measure all routers. Raises BenchError."""
        self._tokens.is_fast = True
        call_s = statistics.median(ask_unary(self._clients, NUM_CALLS))
        self._tokens.is_fast = False
        [stream] = ask_streams(self._clients, 1, NEW_TOKENS)
        return Latency(name, number, 1e3 * call_s, 1e3 * statistics.median(stream.pauses_s))


def _start(stack: ExitStack, num_workers: int) -> _Router:
    directory, tokens = stack.enter_context(tempfile.TemporaryDirectory(prefix="latency-")), RandomTokens()
    tokens.watch(0, 0)  # steps do not wait for further streams
    bench = stack.enter_context(running(Path(directory), 8, [GRPC], tokens, None, num_workers))
    target = bench.router.grpc_target
    return _Router(tokens, stack.enter_context(worker.start(timed_clients.MODULE, target)))


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
