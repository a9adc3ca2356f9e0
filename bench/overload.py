"""Measures the responses of a service that receives three times as many requests as it can serve, compared
with a service at its limit, and the latency of refusals."""

import asyncio
import random
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from bench.figures import percentile
from bench.load import CHANNEL_OPTIONS, Answer, Job, Request, ask, make_requests, start_clock
from bench.rates import service_flags
from bench.service import BenchError, launch
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from tgis.pb.generation_pb2_grpc import GenerationServiceAsyncStub

PLACES = 16  # requests that the service admits at once
CHANNELS = 8
INPUT_TOKENS, NEW_TOKENS = 32, 32
SATURATED_S, OVERLOADED_S = 8.0, 15.0
FACTOR = 3
REFUSAL = "RESOURCE_EXHAUSTED: Model is overloaded"


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
    with launch(model, options.cache / "overload.log", flags) as (target, _):
        rounds = asyncio.run(_measure(target, options.rounds))
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


async def _measure(target: str, rounds: int) -> list[Round]:
    channels = [grpc.aio.insecure_channel(target, CHANNEL_OPTIONS) for _ in range(CHANNELS)]
    try:
        stubs = [GenerationServiceStub(channel) for channel in channels]
        return [await _measure_round(stubs) for _ in range(rounds)]
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


async def _measure_round(stubs: "list[GenerationServiceAsyncStub]") -> Round:
    job = Job("", "unary", PLACES, 1, INPUT_TOKENS, NEW_TOKENS, time.time_ns(), 3600.0)
    requests = make_requests(job)
    full = await _fill(stubs, job, requests)
    rate = len(full) / max(answer.arrivals[-1] for answer in full)
    arrived = await _flood(stubs, job, requests, FACTOR * rate)
    answered = [answer for answer in arrived if answer.error is None]
    refused = [answer for answer in arrived if answer.error == REFUSAL]
    if len(answered) + len(refused) < len(arrived):
        raise BenchError("requests failed that were neither answered nor refused")
    result = Round(
        full=rate,
        overloaded=len(answered) / max(answer.arrivals[-1] for answer in answered),
        full_p99_s=percentile([answer.arrivals[-1] - answer.sent for answer in full], 99),
        overloaded_p99_s=percentile([answer.arrivals[-1] - answer.sent for answer in answered], 99),
        refusal_p99_s=percentile([answer.ended - answer.sent for answer in refused], 99),
    )
    print(f"overloaded: {result.overloaded:.1f} to {result.full:.1f} requests/s", file=sys.stderr, flush=True)
    return result


async def _fill(
    stubs: "list[GenerationServiceAsyncStub]", job: Job, requests: Iterator[Request]
) -> list[Answer]:
    """Run as many closed-loop clients as the service admits."""
    clock = start_clock()

    async def repeat(stub: "GenerationServiceAsyncStub") -> list[Answer]:
        answers = []
        while clock.read() < SATURATED_S:
            answers.append(await ask(stub, job, next(requests), NEW_TOKENS, 0, clock))
        return answers

    chosen = cycle(stubs)
    lists = await asyncio.gather(*(repeat(next(chosen)) for _ in range(PLACES)))
    answers = [answer for each in lists for answer in each]
    if failed := [answer.error for answer in answers if answer.error]:
        raise BenchError(f"{len(failed)} requests failed, first: {failed[0]}")
    return answers


async def _flood(
    stubs: "list[GenerationServiceAsyncStub]", job: Job, requests: Iterator[Request], rate: float
) -> list[Answer]:
    """Send requests at a fixed rate, independently of the responses."""
    clock, source, tasks, due = start_clock(), random.Random(0), [], 0.0
    chosen = cycle(stubs)
    while (due := due + source.expovariate(rate)) < OVERLOADED_S:
        await asyncio.sleep(max(0.0, due - clock.read()))
        tasks.append(asyncio.create_task(ask(next(chosen), job, next(requests), NEW_TOKENS, 0, clock)))
    return list(await asyncio.gather(*tasks))
