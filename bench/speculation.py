"""Measures the gain of `--speculate`: the same requests to a service with it and to one without, in turns,
with one client.

The model generates the texts itself. With greedy sampling, a model of random weights soon repeats itself, so
the text is all repetition. With sampling it does not; sampled from the few likeliest tokens, it returns to
the same phrases repeatedly and continues them differently, which is the worst case for drafts."""

import argparse
import json
import signal
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import grpc

from bench import shapes
from bench.load import Job, make_prompts
from bench.service import BenchError, launch
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

MAX_DRAFTS = 6
NEW_TOKENS, INPUT_TOKENS = 96, 128
TIMEOUT_S = 120.0
REPETITIVE, OTHER = "speculation", "speculation other"


@dataclass(frozen=True)
class Text:
    """Way to generate the text, and the figure that it belongs to."""

    name: str
    figure: str
    params: pb.Parameters


def make_texts() -> list[Text]:
    greedy = pb.Parameters(method=pb.GREEDY)
    free, narrow = (pb.Parameters(method=pb.SAMPLE) for _ in range(2))
    for params in (free, narrow):
        params.sampling.temperature, params.sampling.seed = 1.0, 1
    narrow.sampling.top_k = 3
    texts = [
        Text("greedy", REPETITIVE, greedy),
        Text("sampled", OTHER, free),
        Text("sampled of the 3 best", OTHER, narrow),
    ]
    for text in texts:
        text.params.truncate_input_tokens = INPUT_TOKENS
        text.params.stopping.max_new_tokens = text.params.stopping.min_new_tokens = NEW_TOKENS
    return texts


def run(options: Namespace, model: Path) -> dict[str, Any]:
    """Return the ratios of every round, by figure. Raises BenchError."""
    flags, log = ["--dtype", options.dtype], options.cache / "speculation"
    with (
        _serving(model, log.with_suffix(".without.log"), flags) as without,
        _serving(model, log.with_suffix(".log"), [*flags, "--speculate", str(MAX_DRAFTS)]) as speculating,
    ):
        ratios = {text.name: _compare(text, without, speculating, options.rounds) for text in make_texts()}
    figures: dict[str, Any] = {}
    for figure in (REPETITIVE, OTHER):
        mine = {text.name: ratios[text.name] for text in make_texts() if text.figure == figure}
        worst = min(mine, key=lambda name: statistics.median(mine[name]))
        summaries = (f"{name} × {statistics.median(values):.2f}" for name, values in mine.items())
        figures[figure] = {
            "values": mine[worst],
            "detail": f"{', '.join(summaries)}; up to {MAX_DRAFTS} drafts",
        }
    return {"figures": figures, "ratios": ratios}


@contextmanager
def _serving(model: Path, log: Path, flags: list[str]) -> Iterator[GenerationServiceStub]:
    with launch(model, log, flags) as (target, _), grpc.insecure_channel(target) as channel:
        yield GenerationServiceStub(channel)


def _compare(
    text: Text, without: GenerationServiceStub, speculating: GenerationServiceStub, rounds: int
) -> list[float]:
    """Return tokens per second with speculation relative to those without, for one prompt after the other;
    the better of two tries each. A first round warms up the kernels. Raises BenchError."""
    job = Job("", "stream", 1, 1, INPUT_TOKENS, NEW_TOKENS, time.time_ns(), TIMEOUT_S)
    ratios = []
    for prompt in islice(make_prompts(job), rounds + 1):
        tries = (without, speculating, speculating, without)
        rates, outputs = zip(*(_generate(stub, prompt, text.params) for stub in tries), strict=True)
        if len(set(outputs)) > 1:
            raise BenchError(f"speculation changed a text ({text.name})")
        ratios.append(max(rates[1:3]) / max(rates[0], rates[3]))
    print(f"{text.name}: {', '.join(f'{ratio:.2f}' for ratio in ratios[1:])}", file=sys.stderr, flush=True)
    return ratios[1:]


def _generate(stub: GenerationServiceStub, prompt: str, params: pb.Parameters) -> tuple[float, str]:
    """Return the tokens per second after the first one, and the text."""
    request = pb.SingleGenerationRequest(request=pb.GenerationRequest(text=prompt), params=params)
    first, parts = 0.0, []
    for message in stub.GenerateStream(request, timeout=TIMEOUT_S):
        if message.generated_token_count and not first:
            first = time.perf_counter()
        parts.append(message.text)
    if message.generated_token_count != NEW_TOKENS:
        raise BenchError(f"a text ended after {message.generated_token_count} tokens")
    return (NEW_TOKENS - 1) / (time.perf_counter() - first), "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description="Measures --speculate.")
    parser.add_argument("--shape", choices=list(shapes.SHAPES), default="135m", help="(default %(default)s)")
    parser.add_argument("--dtype", default="float16", help="type of the weights (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default %(default)s)")
    parser.add_argument(
        "--cache", type=Path, default=Path(".cache/bench"), help="directory of models (default %(default)s)"
    )
    options = parser.parse_args()
    # raised as an exception, so that the services are stopped
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        result = run(options, shapes.ensure_checkpoint(options.shape, options.cache))
    except BenchError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(result["figures"], indent=1))


if __name__ == "__main__":
    main()
