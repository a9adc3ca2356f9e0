"""Measures tokens per second of one router worker and of several, whose shard replies at once, beside
messages per second of as many processes that only run gRPC. It needs cores for all of them and for their
clients."""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench import api_clients, raw_grpc, worker
from bench.api_clients import GRPC
from bench.apis import TIME_LIMIT_S, RandomTokens, running
from bench.contest import Spread
from bench.report import format_table
from bench.service import free_ports
from tests.support.processes import Service
from tgis.process.control_groups import count_cores

MIN_CORES = 8
NUM_STREAMS, NEW_TOKENS = 256, 400
GOAL = 0.8
Measure = Callable[[], float]


@dataclass(frozen=True)
class Rate:
    name: str
    num_workers: int
    round: int
    rate: float


def measure(options: argparse.Namespace) -> str:
    """Measure all routers. Raises BenchError."""
    num_cores = count_cores()
    if num_cores < MIN_CORES:
        return f"Not measured: {num_cores} cores, where {MIN_CORES} are needed."
    max_workers = max(2, num_cores // 4)
    with ExitStack() as stack:
        contenders = dict(_start_all(stack, max_workers))
        rates = []
        for number in range(options.rounds):
            for (name, num_workers), take in contenders.items():
                rates.append(Rate(name, num_workers, number, take()))
                print(rates[-1], file=sys.stderr, flush=True)
    return format_rates(rates)


def _start_all(stack: ExitStack, max_workers: int) -> Iterator[tuple[tuple[str, int], Measure]]:
    for num_workers in (1, max_workers):
        yield ("router", num_workers), _start_router(stack, num_workers, max_workers)
    for num_workers in (1, max_workers):
        yield ("gRPC alone", num_workers), _start_raw(stack, num_workers, max_workers)


def _start_router(stack: ExitStack, num_workers: int, num_clients: int) -> Measure:
    directory, tokens = stack.enter_context(tempfile.TemporaryDirectory(prefix="rates-")), RandomTokens(True)
    bench = stack.enter_context(running(Path(directory), NUM_STREAMS, [GRPC], tokens, None, num_workers))
    stream = _start_clients(stack, bench.router.grpc_target, num_clients)

    def take() -> float:
        tokens.watch(NUM_STREAMS, 0)
        stream()
        times, num_tokens = tokens.rest()
        return num_tokens / times.wall_s

    return take


def _start_raw(stack: ExitStack, num_workers: int, num_clients: int) -> Measure:
    [port] = free_ports(1)
    for _ in range(num_workers):
        service = Service([str(port)], module=raw_grpc.MODULE)
        stack.callback(service.end)
        service.wait_until_serving()
    stream = _start_clients(stack, f"127.0.0.1:{port}", num_clients)

    def take() -> float:
        begin = time.perf_counter()
        stream()
        return NUM_STREAMS * NEW_TOKENS / (time.perf_counter() - begin)

    return take


def _start_clients(stack: ExitStack, target: str, count: int) -> Callable[[], None]:
    """Return a function that runs all streams to their ends. Raises BenchError."""
    clients = [stack.enter_context(worker.start(api_clients.MODULE, target, target)) for _ in range(count)]
    threads = stack.enter_context(ThreadPoolExecutor(count))
    shares = [NUM_STREAMS * (i + 1) // count - NUM_STREAMS * i // count for i in range(count)]
    questions = [{"api": GRPC, "streams": share, "new_tokens": NEW_TOKENS} for share in shares]

    def stream() -> None:
        list(threads.map(lambda client, question: client.ask(question, TIME_LIMIT_S), clients, questions))

    return stream


def format_rates(rates: Sequence[Rate]) -> str:
    """Return a Markdown table of medians. A share is relative to one worker's rate times the number of
    workers, per round."""
    rows = []
    one = {(each.name, each.round): each.rate for each in rates if each.num_workers == 1}
    for name, num_workers in dict.fromkeys((each.name, each.num_workers) for each in rates):
        chosen = [each for each in rates if (each.name, each.num_workers) == (name, num_workers)]
        rate, share, goal = statistics.median(each.rate for each in chosen), "", ""
        if num_workers > 1:
            shares = [each.rate / num_workers / one[name, each.round] for each in chosen]
            share = f"{Spread.of(shares):.2f}"
            goal = f">= {GOAL}" if name == "router" else ""
        rows.append([name, str(num_workers), f"{rate:.0f}", share, goal])
    return format_table(["", "workers", "tokens or messages/s", "of N x one worker's", "target"], rows)
