"""Compares scores with those of float32, and keeps the results in the data file of the pages."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.accuracy.scores import Scores
from bench.service import BenchError

DATA = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Result:
    """Comparison of a variant with float32 on the same tokens."""

    model: str
    weights: str
    variant: str
    num_tokens: int
    perplexity: float
    ratio: float
    """Perplexity relative to that of float32."""
    ratio_error: float
    """Standard error of the ratio, from the differences between texts."""
    mean_difference: float
    """Mean absolute difference of the log-probabilities of the texts' tokens, in nats."""
    max_difference: float
    greedy_agreement: float
    """Share of positions with the same likeliest token."""


def compare(
    model: str, weights: str, variant: str, exact: Sequence[Scores], other: Sequence[Scores]
) -> Result:
    """Compare the texts that both have. Raises BenchError if there is none, or if tokens differ."""
    pairs = list(zip(exact, other, strict=False))
    if not pairs:
        raise BenchError(f"{variant} has no text in common with float32, which must be measured first")
    if any(mine.tokens != theirs.tokens for mine, theirs in pairs):
        raise BenchError(f"{variant} and float32 have different tokens")
    losses = [np.subtract(mine.logprobs, theirs.logprobs) for mine, theirs in pairs]
    agreed = [np.equal(mine.likeliest, theirs.likeliest) for mine, theirs in pairs]
    loss = np.concatenate(losses)
    logprobs = np.concatenate([theirs.logprobs for _, theirs in pairs])
    ratio = math.exp(loss.mean())
    return Result(
        model,
        weights,
        variant,
        num_tokens=len(loss),
        perplexity=round(math.exp(-logprobs.mean()), 4),
        ratio=round(ratio, 5),
        ratio_error=round(ratio * _standard_error(losses), 5),
        mean_difference=round(float(np.abs(loss).mean()), 6),
        max_difference=round(float(np.abs(loss).max()), 4),
        greedy_agreement=round(float(np.concatenate(agreed).mean()), 5),
    )


def _standard_error(losses: Sequence[np.ndarray]) -> float:
    """Return the standard error of the mean of all tokens. Tokens of one text are not independent."""
    count, mean = len(losses), float(np.concatenate(losses).mean())
    if count < 2:
        return 0.0
    sums = [float((loss - mean).sum()) for loss in losses]
    total = sum(map(len, losses))
    return math.sqrt(sum(each**2 for each in sums) * count / (count - 1)) / total


def read_results(path: Path = DATA) -> list[Result]:
    if not path.is_file():
        return []
    return [Result(**each) for each in json.loads(path.read_text())["results"]]


def add_result(result: Result, digest: str, path: Path = DATA) -> None:
    """Add a result, or replace the one of the same variant. Raises BenchError if the file's results are for
    other texts."""
    content: dict[str, Any] = {"texts": digest, "results": []}
    if path.is_file():
        content = json.loads(path.read_text())
    if content["texts"] != digest:
        raise BenchError(f"{path} has results for the texts of another Python version")
    key = _key(asdict(result))
    kept = [each for each in content["results"] if _key(each) != key]
    kept.append(asdict(result))
    content["results"] = sorted(kept, key=_key)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.rename(path)


def _key(result: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(result[name]) for name in ("model", "weights", "variant"))
