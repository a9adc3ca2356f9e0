"""Measures the responses of a service that receives three times as many requests as it can serve, compared
with a service at its limit, and the latency of refusals."""

import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.generator import Generator, closed_loop, load_processes, new_prompts, open_loop
from bench.rates import service_flags
from bench.service import BenchError, launch
from tgis.load.records import AnswerRecord
from tgis.load.statistics import quantile
from tgis.load.workload.arrivals import arrival_times

PLACES = 16  # requests that the service admits at once
CHANNELS = 8
INPUT_TOKENS, NEW_TOKENS = 32, 32
SATURATED_S, OVERLOADED_S = 8.0, 15.0
FACTOR = 3
REFUSAL = "RESOURCE_EXHAUSTED"


@dataclass(frozen=True)
class Round:
    """Responses per second at the limit and under overload, and, in seconds, the p99 latencies of responses
    in both cases and of refusals."""

    full: float
    overloaded: float
    full_p99_s: float
    overloaded_p99_s: float
    refusal_p99_s: float


def run(options: Namespace, model: Path) -> dict[str, Any]:
    """Measure both cases. Raises BenchError."""
    flags = [*service_flags(options), "--max-concurrent-requests", str(PLACES)]
    with launch(model, options.cache / "overload.log", flags) as (target, _), load_processes() as generator:
        rounds = [_measure_round(generator, target) for _ in range(options.rounds)]
    full, overloaded, before_s, p99_s, refusal_s = (
        statistics.median(getattr(each, name) for each in rounds)
        for name in ("full", "overloaded", "full_p99_s", "overloaded_p99_s", "refusal_p99_s")
    )
    detail = (
        f"{overloaded:.1f} to {full:.1f} requests/s; p99 of the answered {1e3 * p99_s:.0f} to "
        f"{1e3 * before_s:.0f} ms, of the refused {1e3 * refusal_s:.0f} ms"
    )
    values = [each.overloaded / each.full for each in rounds]
    return {"figures": {"overload": {"values": values, "detail": detail}}, "rounds": rounds}


def _measure_round(generator: Generator, target: str) -> Round:
    full = _fill(generator, target)
    rate = len(full) / max(answer.ended for answer in full)
    arrived = _flood(generator, target, FACTOR * rate)
    answered = [answer for answer in arrived if answer.error is None]
    refused = [answer for answer in arrived if answer.error == REFUSAL]
    if len(answered) + len(refused) < len(arrived):
        raise BenchError("requests failed that were neither answered nor refused")
    result = Round(
        full=rate,
        overloaded=len(answered) / max(answer.ended for answer in answered),
        full_p99_s=_p99(full),
        overloaded_p99_s=_p99(answered),
        refusal_p99_s=_p99(refused),
    )
    print(f"overloaded: {result.overloaded:.1f} to {result.full:.1f} requests/s", file=sys.stderr, flush=True)
    return result


def _fill(generator: Generator, target: str) -> list[AnswerRecord]:
    """Run as many closed-loop clients as the service admits."""
    workload = new_prompts(INPUT_TOKENS, NEW_TOKENS, unary_share=1.0)
    job = closed_loop(target, workload, PLACES, num_conversations=None, duration_s=SATURATED_S)
    return generator.answers(job)


def _flood(generator: Generator, target: str, rate: float) -> list[AnswerRecord]:
    """Send requests at a fixed rate, independently of the responses."""
    workload = new_prompts(INPUT_TOKENS, NEW_TOKENS, unary_share=1.0)
    times = arrival_times("poisson", rate, OVERLOADED_S, None, seed=0)
    return generator.run(open_loop(target, workload, times, CHANNELS)).records


def _p99(answers: Sequence[AnswerRecord]) -> float:
    return quantile(sorted(answer.ended - answer.sent for answer in answers), 0.99)
