"""Measures the latency of small requests, and the memory that the router keeps, while other clients send
texts of 4 MB, which are refused, as fast as they can."""

import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil

from bench.load import CHANNEL_OPTIONS
from bench.rates import service_flags
from bench.service import BenchError, launch
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

CLIENTS = 4
TEXT = "word " * 800_000
SMALL_TEXT = "a small request"
QUIET_S, FLOOD_S = 10.0, 20.0
SETTLE_S = 10.0  # by then the router has released the memory of refused texts
PAUSE_S = 0.02  # between two small requests
TIMEOUT_S = 120.0
MIB = 1 << 20


@dataclass(frozen=True)
class Round:
    """Latencies of the small requests, alone and during the flood, and the router's growth in bytes."""

    quiet: list[float]
    flooded: list[float]
    num_refused: int
    grown_bytes: int

    @property
    def median_rise_s(self) -> float:
        return statistics.median(self.flooded) - statistics.median(self.quiet)


def run(options: Namespace, model: Path) -> dict[str, Any]:
    """Run the clients. Raises BenchError."""
    rounds = [
        measure(model, options.cache / "flood.log", service_flags(options)) for _ in range(options.rounds)
    ]
    worst = [max(each.flooded) for each in rounds]
    rises = [1e3 * each.median_rise_s for each in rounds]
    quiet = 1e3 * statistics.median(statistics.median(each.quiet) for each in rounds)
    refused = statistics.median(each.num_refused for each in rounds)
    grown = [each.grown_bytes / MIB for each in rounds]
    return {
        "figures": {
            "flood median": {"values": rises, "detail": f"{quiet:.1f} ms alone; {refused:.0f} texts refused"},
            "flood worst": {"values": worst, "detail": f"of {FLOOD_S:.0f} s"},
            "flood memory": {"values": grown, "detail": f"{SETTLE_S:.0f} s after the last refusal"},
        },
        "rounds": rounds,
    }


def measure(model: Path, log: Path, flags: list[str], directory: Path | None = None) -> Round:
    """Measure the package in `directory`, by default this one. Raises BenchError."""
    with launch(model, log, flags, directory) as (target, _):
        with grpc.insecure_channel(target, CHANNEL_OPTIONS) as channel:
            stub = GenerationServiceStub(channel)
            _refuse(stub)
            quiet = list(_ask_small(stub, QUIET_S))
            before = _router_bytes()
            with _flooding(target) as clients:
                flooded = list(_ask_small(stub, FLOOD_S))
            num_refused = sum(int(client.stdout.read()) for client in clients if client.stdout)
            time.sleep(SETTLE_S)
            return Round(quiet, flooded, num_refused, _router_bytes() - before)


def flood(target: str, seconds: float) -> int:
    """Send texts one after the other, and return how many were refused."""
    end, count = time.monotonic() + seconds, 0
    with grpc.insecure_channel(target, CHANNEL_OPTIONS) as channel:
        stub = GenerationServiceStub(channel)
        while time.monotonic() < end:
            _refuse(stub)
            count += 1
    return count


def _refuse(stub: GenerationServiceStub) -> None:
    try:
        stub.Generate(_request(TEXT), timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            return
        raise BenchError(f"a text was not refused as too long but with {error.code()}") from error
    raise BenchError("a text of 4 MB was not refused")


def _ask_small(stub: GenerationServiceStub, seconds: float) -> Iterator[float]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.perf_counter()
        stub.Generate(_request(SMALL_TEXT), timeout=TIMEOUT_S)
        yield time.perf_counter() - start
        time.sleep(PAUSE_S)


def _request(text: str) -> pb.BatchedGenerationRequest:
    params = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=1))
    return pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=text)], params=params)


@contextmanager
def _flooding(target: str) -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "bench.flood", target, str(FLOOD_S)]
    clients = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(CLIENTS)]
    try:
        yield clients
        for client in clients:
            if client.wait(TIMEOUT_S):
                raise BenchError(f"a client of the flood ended with status {client.returncode}")
    finally:
        for client in clients:
            client.kill()
            client.wait()


def _router_bytes() -> int:
    for process in psutil.Process().children(recursive=True):
        if "router" in process.cmdline():
            return int(process.memory_info().rss)
    raise BenchError("the router is gone")


if __name__ == "__main__":
    print(flood(sys.argv[1], float(sys.argv[2])))
