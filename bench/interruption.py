"""Measures the time between tokens of 16 short streams while a prompt of 2,048 tokens is computed beside
them, compared with the same streams alone; in turns, with one service."""

import asyncio
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from bench.figures import percentile
from bench.load import CHANNEL_OPTIONS, Answer, Job, ask, make_requests, start_clock
from bench.rates import service_flags
from bench.service import BenchError, launch
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from tgis.pb.generation_pb2_grpc import GenerationServiceAsyncStub

STREAMS, SHORT_TOKENS, NEW_TOKENS = 16, 32, 96
PROMPT_TOKENS = 2048
COMES_AFTER = 20  # tokens of the streams
TIMEOUT_S = 120.0


def run(options: Namespace, model: Path) -> dict[str, Any]:
    """Measure both. Raises BenchError."""
    with launch(model, options.cache / "interruption.log", service_flags(options)) as (target, _):
        rounds = asyncio.run(_measure(target, options.rounds))
    alone, beside, first_s = (
        statistics.median(getattr(each, name) for each in rounds)
        for name in ("alone_s", "beside_s", "first_s")
    )
    detail = f"{1e3 * beside:.0f} to {1e3 * alone:.0f} ms; the prompt's first token after {first_s:.1f} s"
    values = [each.beside_s / each.alone_s for each in rounds]
    return {"figures": {"interruption": {"values": values, "detail": detail}}, "rounds": rounds}


@dataclass(frozen=True)
class Round:
    """p99 between tokens, without and with the prompt, and the prompt's own waiting time, in seconds."""

    alone_s: float
    beside_s: float
    first_s: float


async def _measure(target: str, rounds: int) -> list[Round]:
    channels = [grpc.aio.insecure_channel(target, CHANNEL_OPTIONS) for _ in range(1 + STREAMS)]
    try:
        stubs = [GenerationServiceStub(channel) for channel in channels]
        await _run_streams(stubs, None)
        return [await _measure_round(stubs) for _ in range(rounds)]
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


async def _measure_round(stubs: "list[GenerationServiceAsyncStub]") -> Round:
    alone, _ = await _run_streams(stubs, None)
    starts = [answer.arrivals[COMES_AFTER] for answer in alone]
    comes = statistics.median(starts)
    beside, prompt = await _run_streams(stubs, comes)
    assert prompt is not None
    result = Round(
        alone_s=percentile(find_gaps(alone, comes, TIMEOUT_S), 99),
        beside_s=percentile(find_gaps(beside, prompt.sent, prompt.arrivals[0]), 99),
        first_s=prompt.arrivals[0] - prompt.sent,
    )
    beside_ms, alone_ms = 1e3 * result.beside_s, 1e3 * result.alone_s
    print(f"between tokens, p99: {beside_ms:.0f} to {alone_ms:.0f} ms", file=sys.stderr)
    return result


async def _run_streams(
    stubs: "list[GenerationServiceAsyncStub]", comes: float | None
) -> tuple[list[Answer], Answer | None]:
    """Run the streams; the long prompt is sent at the given second, if at all."""
    short, long = _job(SHORT_TOKENS), _job(PROMPT_TOKENS)
    requests, [prompt] = make_requests(short), [next(make_requests(long))]
    clock = start_clock()
    streams = [
        asyncio.create_task(ask(stub, short, next(requests), NEW_TOKENS, index, clock))
        for index, stub in enumerate(stubs[1:])
    ]
    answers = []
    if comes is not None:
        await asyncio.sleep(comes - clock.read())
        answers.append(await ask(stubs[0], long, prompt, 1, STREAMS, clock))
    answers = [*await asyncio.gather(*streams), *answers]
    if failed := [answer.error for answer in answers if answer.error]:
        raise BenchError(f"{len(failed)} streams failed, first: {failed[0]}")
    return answers[:STREAMS], answers[-1] if comes is not None else None


def _job(input_tokens: int) -> Job:
    """Return new prompts."""
    sizes = (STREAMS, 1, input_tokens, NEW_TOKENS)
    return Job("", "stream", *sizes, time.time_ns(), TIMEOUT_S, every_token=True)


def find_gaps(answers: Iterable[Answer], begin: float, end: float) -> list[float]:
    """Return the seconds between tokens of a stream whose waiting time overlaps the interval."""
    return [
        after - before
        for answer in answers
        for before, after in pairwise(answer.arrivals)
        if after > begin and before < end
    ]
