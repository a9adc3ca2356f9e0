"""Measures the accuracy of precisions on real models, compared with float32: perplexity, log-probabilities
and greedy tokens of 20,000 tokens, through the service.

`python -m bench.accuracy --model SmolLM2-135M-Instruct` adds results to bench/accuracy/results.json, from
which `make docs` generates tables. An interrupted measurement resumes where it stopped."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.accuracy.checkpoints import FILES, Subject
from bench.accuracy.results import DATA, add_result, compare
from bench.accuracy.scores import read_scores, score
from bench.accuracy.texts import NUM_WINDOWS, digest, read_windows
from bench.accuracy.variants import REFERENCE, VARIANTS, Variant
from bench.service import BenchError, exit_on_sigterm, first_line


def measure(subject: Subject, variant: Variant, num_texts: int, seconds: float, data: Path) -> str:
    """Measure a variant and return a line about the result. Raises BenchError."""
    texts = read_windows()
    path = subject.directory / "scores" / f"{variant.name}.jsonl"
    if len(read_scores(path)) < min(num_texts, len(texts)):
        score(subject.make(variant), variant.flags, texts[:num_texts], path, seconds)
    exact = read_scores(path.with_name(f"{REFERENCE.name}.jsonl"))
    result = compare(subject.model, subject.weights, variant.name, exact, read_scores(path))
    add_result(result, digest(texts), data)
    return (
        f"{subject.model} {subject.weights} {variant.name}: {result.num_tokens} tokens, perplexity "
        f"{result.perplexity:.3f}, {result.ratio:.4f} ± {result.ratio_error:.4f} of float32's, "
        f"mean difference {result.mean_difference:.2e}, agreement {result.greedy_agreement:.4f}"
    )


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    models = list(FILES)
    names = [each.name for each in VARIANTS]
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description=__doc__)
    parser.add_argument("--model", choices=models, default=models[0], help="(default %(default)s)")
    parser.add_argument(
        "--weights",
        choices=("original", "noised"),
        default="original",
        help="noised: with noise of half a quantization step, so that weights lie on no format's grid",
    )
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=names, metavar="NAMES", help=",".join(names)
    )
    parser.add_argument(
        "--texts", type=int, default=NUM_WINDOWS, help="number of texts (default and maximum %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="time limit for the texts of a variant"
    )
    parser.add_argument("--json", type=Path, default=DATA, metavar="FILE", help="file of the results")
    options = parser.parse_args(arguments)
    if unknown := set(options.only) - set(names):
        parser.error(f"{min(unknown)} is none of {','.join(names)}")
    return options


def main() -> None:
    exit_on_sigterm()
    options = parse_options(sys.argv[1:])
    subject = Subject(options.model, options.weights)
    failed = False
    for variant in VARIANTS:
        if variant.name in options.only:
            try:
                line = measure(subject, variant, options.texts, options.seconds, options.json)
            except BenchError as error:
                failed, line = True, f"{variant.name}: {first_line(error)}"
            print(line, flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
