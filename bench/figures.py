"""Computes rates and percentiles from the arrival times of tokens."""

import math
import statistics
from collections.abc import Iterable, Sequence

from bench.load import Answer, Job

PERCENTS = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest of `values` that at least `percent` of them do not exceed; NaN without values."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def summarize(job: Job, answers: Sequence[Answer]) -> dict[str, float]:
    """Return tokens per second and milliseconds. Failed requests are only counted; without any response, the
    figures are NaN.

    `output_tokens_per_s` covers the whole measurement; `decode_tokens_per_s` is the rate of all clients
    together while they decode: clients * (tokens - 1) / (median time from a request's first to its last
    token)."""
    good = [answer for answer in answers if not answer.error and answer.counts]
    tokens = sum(answer.counts[-1] for answer in good)
    ends = [answer.arrivals[-1] for answer in good]
    figures = {
        "requests": float(len(good)),
        "failed": float(len(answers) - len(good)),
        "input_tokens": statistics.fmean([answer.input_tokens for answer in good]) if good else math.nan,
        "output_tokens_per_s": tokens / (max(ends) - min(answer.sent for answer in good))
        if good
        else math.nan,
    }
    figures |= _percentiles("answer_ms", [answer.arrivals[-1] - answer.sent for answer in good])
    if job.mode == "stream":
        figures |= _percentiles("first_token_ms", [answer.arrivals[0] - answer.sent for answer in good])
        figures |= _percentiles("token_ms", [gap for answer in good for gap in token_gaps(answer)])
        figures["decode_tokens_per_s"] = _decode_rate(job.clients, good)
    return figures


def token_gaps(answer: Answer) -> list[float]:
    """Return the seconds per token after the first message; tokens of one message share its delay."""
    gaps = []
    for index in range(1, len(answer.arrivals)):
        num_tokens = answer.counts[index] - answer.counts[index - 1]
        gaps += [(answer.arrivals[index] - answer.arrivals[index - 1]) / num_tokens] * num_tokens
    return gaps


def median_figures(repeats: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return each figure's median over the repeats."""
    return {name: statistics.median(figures[name] for figures in repeats) for name in repeats[0]}


def _percentiles(name: str, seconds: Iterable[float]) -> dict[str, float]:
    values = [second * 1e3 for second in seconds]
    return {f"{name}_p{percent}": percentile(values, percent) for percent in PERCENTS}


def _decode_rate(clients: int, answers: Sequence[Answer]) -> float:
    long = [answer for answer in answers if len(answer.arrivals) > 1]
    if not long:
        return math.nan
    per_client = [
        (answer.counts[-1] - answer.counts[0]) / (answer.arrivals[-1] - answer.arrivals[0]) for answer in long
    ]
    return clients * statistics.median(per_client)
