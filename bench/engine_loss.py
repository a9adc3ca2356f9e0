"""Measures the pause of 64 streams when the engine process of a service with three router workers is killed,
compared with the time to prefill prompts of their length, and checks that their texts are those of an
undisturbed run."""

import asyncio
import os
import signal
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import psutil

from bench.load import CHANNEL_OPTIONS, Job, make_prompts
from bench.rates import service_flags
from bench.service import BenchError, launch
from tests.support.processes import children_of
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from tgis.pb.generation_pb2_grpc import GenerationServiceAsyncStub

STREAMS, PROMPT_TOKENS, NEW_TOKENS, WORKERS = 64, 32, 96, 3
COMES_AFTER = 32  # tokens of every stream
TIMEOUT_S = 120.0


@dataclass
class Stream:
    text: str = ""
    num_tokens: int = 0
    arrivals: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Round:
    pause_s: float
    computing_s: float
    """Time for prompts as long as the streams at the loss to get their first tokens."""


def run(options: Namespace, model: Path) -> dict[str, Any]:
    """Measure the losses. Raises BenchError."""
    flags = [*service_flags(options), "--router-workers", str(WORKERS)]
    with launch(model, options.cache / "engine_loss.log", flags) as (target, _):
        rounds = asyncio.run(_measure(target, options.rounds))
    pauses = [each.pause_s for each in rounds]
    computing = statistics.median(each.computing_s for each in rounds)
    detail = f"computing as many tokens anew takes {computing:.2f} s; no text differs"
    return {"figures": {"engine loss": {"values": pauses, "detail": detail}}, "rounds": rounds}


async def _measure(target: str, rounds: int) -> list[Round]:
    channels = [grpc.aio.insecure_channel(target, CHANNEL_OPTIONS) for _ in range(STREAMS)]
    try:
        stubs = [GenerationServiceStub(channel) for channel in channels]
        return [await _measure_round(stubs) for _ in range(rounds)]
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


async def _measure_round(stubs: "Sequence[GenerationServiceAsyncStub]") -> Round:
    """Run the streams. Each run has new prompts, which are in no cache, except for the run that is
    compared."""
    prompts, seed = _prompts(PROMPT_TOKENS), time.time_ns()
    undisturbed = [Stream() for _ in stubs]
    await _run_streams(stubs, prompts, undisturbed, PROMPT_TOKENS, NEW_TOKENS, seed)
    streams, loss = [Stream() for _ in stubs], _Loss()
    await _run_streams(stubs, prompts, streams, PROMPT_TOKENS, NEW_TOKENS, seed, loss)
    if any(one.text != other.text for one, other in zip(streams, undisturbed, strict=True)):
        raise BenchError("a text differs from that of an undisturbed run")
    num_tokens, firsts = PROMPT_TOKENS + COMES_AFTER, [Stream() for _ in stubs]
    begin = time.perf_counter()
    await _run_streams(stubs, _prompts(num_tokens), firsts, num_tokens, 1, seed)
    result = Round(_longest_pause(streams, loss.at), time.perf_counter() - begin)
    print(f"pause {result.pause_s:.2f} s, computing {result.computing_s:.2f} s", file=sys.stderr, flush=True)
    return result


def _prompts(num_tokens: int) -> list[str]:
    texts = make_prompts(Job("", "stream", STREAMS, 1, num_tokens, 1, time.time_ns(), TIMEOUT_S))
    return [next(texts) for _ in range(STREAMS)]


async def _run_streams(
    stubs: "Sequence[GenerationServiceAsyncStub]",
    prompts: Sequence[str],
    streams: Sequence[Stream],
    num_input: int,
    num_new: int,
    seed: int,
    loss: "_Loss | None" = None,
) -> None:
    params = pb.Parameters(
        method=pb.SAMPLE,
        sampling=pb.SamplingParameters(seed=seed),
        stopping=pb.StoppingCriteria(max_new_tokens=num_new, min_new_tokens=num_new),
        truncate_input_tokens=num_input,
        response=pb.ResponseOptions(generated_tokens=True),
    )

    async def run_one(stub: "GenerationServiceAsyncStub", prompt: str, stream: Stream) -> None:
        request = pb.SingleGenerationRequest(request=pb.GenerationRequest(text=prompt), params=params)
        async for message in stub.GenerateStream(request, timeout=TIMEOUT_S):
            stream.text += message.text
            stream.num_tokens = message.generated_token_count
            stream.arrivals.append(time.perf_counter())
            if loss is not None and not loss.at and min(each.num_tokens for each in streams) >= COMES_AFTER:
                loss.cause()

    try:
        await asyncio.gather(*(run_one(*each) for each in zip(stubs, prompts, streams, strict=True)))
    except grpc.aio.AioRpcError as error:
        raise BenchError(f"a stream failed with {error.code().name}: {error.details()}") from error


@dataclass
class _Loss:
    """Kill the engine process of the only service that this process has launched."""

    at: float = 0.0

    def cause(self) -> None:
        [engine] = chain(*(children_of(child.pid).get("engine", []) for child in psutil.Process().children()))
        os.kill(engine, signal.SIGKILL)
        self.at = time.perf_counter()


def _longest_pause(streams: Sequence[Stream], killed_at: float) -> float:
    """Return the longest time between two messages of a stream whose second message came after the loss."""
    pairs = [pair for stream in streams for pair in pairwise(stream.arrivals)]
    return max(after - before for before, after in pairs if after > killed_at)
