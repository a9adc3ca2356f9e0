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
from argparse import Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import shapes
from bench.generator import Generator, closed_loop, load_processes, new_prompts
from bench.service import BenchError, launch

MAX_DRAFTS = 6
NEW_TOKENS, INPUT_TOKENS = 96, 128
TIMEOUT_S = 120.0
REPETITIVE, OTHER = "speculation", "speculation other"


@dataclass(frozen=True)
class Text:
    """Way to generate the text, and the figure that it belongs to."""

    name: str
    figure: str
    sampling: dict[str, Any] = field(default_factory=dict)


TEXTS = (
    Text("greedy", REPETITIVE),
    Text("sampled", OTHER, {"temperature": 1.0}),
    Text("sampled of the 3 best", OTHER, {"temperature": 1.0, "top_k": 3}),
)


def run(options: Namespace, model: Path) -> dict[str, Any]:
    """Return the ratios of every round, by figure. Raises BenchError."""
    flags, log = ["--dtype", options.dtype], options.cache / "speculation"
    with (
        launch(model, log.with_suffix(".without.log"), flags) as (without, _),
        launch(model, log.with_suffix(".log"), [*flags, "--speculate", str(MAX_DRAFTS)]) as (speculating, _),
        load_processes() as generator,
    ):
        ratios = {
            text.name: _compare(generator, text, without, speculating, options.rounds) for text in TEXTS
        }
    figures: dict[str, Any] = {}
    for figure in (REPETITIVE, OTHER):
        mine = {text.name: ratios[text.name] for text in TEXTS if text.figure == figure}
        worst = min(mine, key=lambda name: statistics.median(mine[name]))
        summaries = (f"{name} × {statistics.median(values):.2f}" for name, values in mine.items())
        figures[figure] = {
            "values": mine[worst],
            "detail": f"{', '.join(summaries)}; up to {MAX_DRAFTS} drafts",
        }
    return {"figures": figures, "ratios": ratios}


def _compare(generator: Generator, text: Text, without: str, speculating: str, rounds: int) -> list[float]:
    """Return tokens per second with speculation relative to those without, for one prompt after the other;
    the better of two tries each. A first round warms up the kernels. Raises BenchError."""
    ratios = []
    for _ in range(rounds + 1):
        job = closed_loop("", new_prompts(INPUT_TOKENS, NEW_TOKENS, **text.sampling), 1, timeout_s=TIMEOUT_S)
        tries = (without, speculating, speculating, without)
        answers = [
            answer
            for address in tries
            for answer in generator.answers(replace(job, target=replace(job.target, address=address)))
        ]
        if len({answer.digest for answer in answers}) > 1:
            raise BenchError(f"speculation changed a text ({text.name})")
        rates = [(NEW_TOKENS - 1) / (answer.ended - answer.arrivals[0]) for answer in answers]
        ratios.append(max(rates[1:3]) / max(rates[0], rates[3]))
    print(f"{text.name}: {', '.join(f'{ratio:.2f}' for ratio in ratios[1:])}", file=sys.stderr, flush=True)
    return ratios[1:]


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
