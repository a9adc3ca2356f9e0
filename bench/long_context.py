"""Measures tokens per second of one client with a long prompt, relative to the limit by reading the weights
and the prompt's keys and values for every token. The prompt is computed once and then read from the prefix
cache."""

import statistics
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from bench.generator import Generator, closed_loop, load_processes, new_prompts
from bench.limits import long_decode_limit
from bench.probe import Probe, highest, probing
from bench.service import BenchError, launch
from bench.shapes import SHAPES, Shape
from tgis.load.job import LoadJob

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
        load_processes() as generator,
    ):
        workload = new_prompts(INPUT_TOKENS, NEW_TOKENS)
        job = closed_loop(target, workload, clients=1, timeout_s=PROMPT_TIMEOUT_S)
        first_s, _ = _generate(generator, job)
        print(f"long: the prompt took {first_s:.0f} s", file=sys.stderr, flush=True)
        rounds = [
            _measure_round(generator, job, probe, SHAPES[options.shape], options.dtype)
            for _ in range(options.rounds)
        ]
    rates, limits = zip(*rounds, strict=True)
    detail = (
        f"{statistics.median(rates):.1f} of {statistics.median(limits):.1f} tokens/s; the prompt took "
        f"{first_s:.0f} s"
    )
    shares = [rate / limit for rate, limit in rounds]
    return {"figures": {"long": {"values": shares, "detail": detail}}, "rounds": rounds}


def _measure_round(
    generator: Generator, job: LoadJob, probe: Probe, shape: Shape, dtype: str
) -> tuple[float, float]:
    """Return the tokens per second after the first one, and their limit measured right before or after."""
    before = probe()
    _, rate = _generate(generator, job)
    rates = highest(before, probe())
    limit = long_decode_limit(shape, dtype, INPUT_TOKENS + NEW_TOKENS // 2, rates)
    print(f"long: {rate:.1f} of {limit:.1f} tokens/s", file=sys.stderr, flush=True)
    return rate, limit


def _generate(generator: Generator, job: LoadJob) -> tuple[float, float]:
    """Return the seconds until the first token, and the tokens per second after it. Raises BenchError."""
    [answer] = generator.answers(job)
    if answer.input_tokens != INPUT_TOKENS:
        raise BenchError(f"{answer.input_tokens} input tokens")
    first, count = answer.arrivals[0], answer.counts[0]
    return first - answer.sent, (NEW_TOKENS - count) / (answer.arrivals[-1] - first)
