"""Measures tokens per second of one client with a long prompt, relative to the limit by reading the weights
and the prompt's keys and values for every token. The prompt is computed once and then read from the prefix
cache."""

import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import grpc

from bench.limits import long_decode_limit
from bench.load import CHANNEL_OPTIONS, Job, make_prompts
from bench.probe import Probe, highest, probing
from bench.service import BenchError, launch
from bench.shapes import SHAPES, Shape
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

INPUT_TOKENS, NEW_TOKENS = 32768, 64
CACHE_TOKENS, MAX_LENGTH = 34816, 33280
# The prompt takes minutes, because the operations of attention grow with the square of its length.
PROMPT_TIMEOUT_S = 3600.0


def run(options: Namespace, model: Path) -> dict[str, Any]:
    """Return the shares of the limit in every round. Raises BenchError."""
    sizes = ["--kv-cache-tokens", str(CACHE_TOKENS), "--max-sequence-length", str(MAX_LENGTH)]
    flags = ["--dtype", options.dtype, *sizes, *options.launcher]
    with (
        probing() as probe,
        launch(model, options.cache / "long.log", flags) as (target, _),
        grpc.insecure_channel(target, CHANNEL_OPTIONS) as channel,
    ):
        stub, request = GenerationServiceStub(channel), _make_request()
        first_s, _ = _generate(stub, request)
        print(f"long: the prompt took {first_s:.0f} s", file=sys.stderr, flush=True)
        rounds = [
            _measure_round(stub, request, probe, SHAPES[options.shape], options.dtype)
            for _ in range(options.rounds)
        ]
    rates, limits = zip(*rounds, strict=True)
    detail = (
        f"{statistics.median(rates):.1f} of {statistics.median(limits):.1f} tokens/s; the prompt took "
        f"{first_s:.0f} s"
    )
    shares = [rate / limit for rate, limit in rounds]
    return {"figures": {"long": {"values": shares, "detail": detail}}, "rounds": rounds}


def _make_request() -> pb.SingleGenerationRequest:
    job = Job("", "stream", 1, 1, INPUT_TOKENS, NEW_TOKENS, time.time_ns(), PROMPT_TIMEOUT_S)
    params = pb.Parameters(
        stopping=pb.StoppingCriteria(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS),
        truncate_input_tokens=INPUT_TOKENS,
    )
    text = next(make_prompts(job))
    return pb.SingleGenerationRequest(request=pb.GenerationRequest(text=text), params=params)


def _measure_round(
    stub: GenerationServiceStub, request: pb.SingleGenerationRequest, probe: Probe, shape: Shape, dtype: str
) -> tuple[float, float]:
    """Return the tokens per second after the first one, and their limit measured right before or after."""
    before = probe()
    _, rate = _generate(stub, request)
    rates = highest(before, probe())
    limit = long_decode_limit(shape, dtype, INPUT_TOKENS + NEW_TOKENS // 2, rates)
    print(f"long: {rate:.1f} of {limit:.1f} tokens/s", file=sys.stderr, flush=True)
    return rate, limit


def _generate(stub: GenerationServiceStub, request: pb.SingleGenerationRequest) -> tuple[float, float]:
    """Return the seconds until the first token, and the tokens per second after it. Raises BenchError."""
    start, first, count, num_inputs = time.perf_counter(), 0.0, 0, 0
    for message in stub.GenerateStream(request, timeout=PROMPT_TIMEOUT_S):
        num_inputs = num_inputs or message.input_token_count
        if message.generated_token_count and not first:
            first, count = time.perf_counter(), message.generated_token_count
    if (num_inputs, message.generated_token_count) != (INPUT_TOKENS, NEW_TOKENS):
        raise BenchError(f"{num_inputs} input tokens and {message.generated_token_count} new ones")
    return first - start, (NEW_TOKENS - count) / (time.perf_counter() - first)
