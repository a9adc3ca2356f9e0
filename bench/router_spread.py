"""Measures how the kernel distributes clients' connections over router workers that share a port."""

import argparse
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench import apis
from bench.api_clients import GRPC
from bench.contest import Spread
from bench.report import format_table
from bench.service import BenchError
from tests.support.connections import count_connections

NUM_WORKERS, NUM_CONNECTIONS, NUM_STREAMS, NUM_TRIALS = 3, (1, 4, 64), 64, 20
ACCEPT_TIMEOUT_S, POLL_S = 10.0, 0.02


def measure(options: argparse.Namespace) -> str:
    """Measure the distribution. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="router-spread-") as directory:
        with apis.running(Path(directory), 8, [GRPC], None, None, NUM_WORKERS) as bench:
            router = bench.router
            trials = {
                count: [_connect(router.service.grpc_port, router.routers, count) for _ in range(NUM_TRIALS)]
                for count in NUM_CONNECTIONS
            }
    return format_spread(trials)


def _connect(port: int, pids: Sequence[int], count: int) -> list[int]:
    """Open `count` connections, and return the number that each worker accepted. Raises BenchError."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        return _wait_for(port, pids, count)


def _wait_for(port: int, pids: Sequence[int], count: int) -> list[int]:
    deadline = time.monotonic() + ACCEPT_TIMEOUT_S
    while time.monotonic() < deadline:
        accepted = [count_connections(pid, port) for pid in pids]
        if sum(accepted) == count:
            return accepted
        time.sleep(POLL_S)
    raise BenchError(f"the workers accepted {accepted} of {count} connections")


def format_spread(trials: dict[int, list[list[int]]]) -> str:
    """Return a Markdown table for streams that are distributed evenly over the connections."""
    streams = f"{NUM_STREAMS} streams over {NUM_WORKERS} workers"
    rows = []
    for count, results in trials.items():
        shares = [max(accepted) * len(accepted) / count for accepted in results]
        example = ", ".join(f"{each * NUM_STREAMS / count:g}" for each in sorted(results[0]))
        rows.append([str(count), example, f"{Spread.of(shares):.2f}"])
    return format_table(["connections", f"{streams}, a trial", "busiest, x the even share"], rows)
