"""Measures the latency of small requests, and the memory that the router keeps, while other clients send
texts of 4 MB, which are refused, as fast as they can."""

import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from bench.generator import Generator, check_answers, closed_loop, load_processes, open_loop
from bench.rates import service_flags
from bench.service import BenchError, launch
from tgis.load.job import LoadJob
from tgis.load.records import AnswerRecord
from tgis.load.workload.arrivals import arrival_times
from tgis.load.workload.conversations import Workload

CLIENTS = 4
TEXT = "word " * 800_000
SMALL_TEXT = "a small request"
REFUSAL = "INVALID_ARGUMENT"
QUIET_S, FLOOD_S = 10.0, 20.0
SETTLE_S = 10.0  # by then the router has released the memory of refused texts
SMALL_PER_S = 20.0
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
    with launch(model, log, flags, directory) as (target, _), load_processes(1 + CLIENTS) as generator:
        _refuse(generator, replace(_clients(target, 1.0), num_conversations=1))
        quiet = generator.answers(_small_requests(target, QUIET_S))
        before = _router_bytes()
        texts = [_clients(target, FLOOD_S) for _ in range(CLIENTS)]
        flooded, num_refused = _flood(generator, _small_requests(target, FLOOD_S), texts)
        time.sleep(SETTLE_S)
        grown = _router_bytes() - before
        return Round(_seconds(quiet), _seconds(flooded), num_refused, grown)


def _seconds(answers: Sequence[AnswerRecord]) -> list[float]:
    return [answer.total_s for answer in answers]


def _small_requests(target: str, seconds: float) -> LoadJob:
    """Return small requests at a constant rate, so that a stall of the service counts for each of them."""
    workload = Workload(texts=(SMALL_TEXT,), output_tokens="1", unary_share=1.0)
    return open_loop(target, workload, arrival_times("constant", SMALL_PER_S, seconds, None, seed=0))


def _clients(target: str, seconds: float) -> LoadJob:
    """Return the job of a client that sends the text again and again."""
    workload = Workload(texts=(TEXT,), output_tokens="1", unary_share=1.0)
    job = closed_loop(target, workload, clients=1, timeout_s=TIMEOUT_S)
    return replace(job, num_conversations=None, duration_s=seconds)


def _flood(generator: Generator, small: LoadJob, texts: Sequence[LoadJob]) -> tuple[list[AnswerRecord], int]:
    """Return the small answers, and the number of refusals."""
    records = generator.run(small, *texts).records
    refused = [record for record in records if record.error == REFUSAL]
    answered = [record for record in records if record.error != REFUSAL]
    check_answers(answered)
    return answered, len(refused)


def _refuse(generator: Generator, job: LoadJob) -> None:
    [record] = generator.run(job).records
    if record.error != REFUSAL:
        raise BenchError(f"a text of 4 MB was not refused as too long but with {record.error}")


def _router_bytes() -> int:
    for process in psutil.Process().children(recursive=True):
        if "router" in process.cmdline():
            return int(process.memory_info().rss)
    raise BenchError("the router is gone")
