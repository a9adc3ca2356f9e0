"""Computes statistics in plain Python, because numpy would slow down the start of the load processes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NORMAL_95 = 1.959964
# Quantiles of Student's t for two-sided intervals of 95 %, by degrees of freedom from 1.
STUDENT_95 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
NUM_BINS = 40


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def standard_deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile of sorted values, interpolated between neighbours."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def quantile_interval(ordered: Sequence[float], share: float) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of a quantile of sorted values.

    Its ends are values whose ranks follow from the binomial distribution, whatever the distribution of the
    values. None: there are too few values for one of its ends."""
    count = len(ordered)
    half = NORMAL_95 * math.sqrt(count * share * (1 - share))
    low, high = math.floor(count * share - half), math.ceil(count * share + half)
    return (ordered[low], ordered[high]) if low >= 0 and high < count else None


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean of repeats; None for fewer than two."""
    if len(values) < 2:
        return None
    degrees = len(values) - 1
    factor = STUDENT_95[degrees - 1] if degrees <= len(STUDENT_95) else NORMAL_95 + 2.4 / degrees
    half = factor * standard_deviation(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def relative_half_width(values: Sequence[float]) -> float:
    """Return half the width of the mean's interval as a share of the mean; infinity if it is unknown."""
    interval = mean_interval(values)
    if interval is None or not mean(values):
        return math.inf
    return (interval[1] - interval[0]) / 2 / abs(mean(values))


@dataclass(frozen=True)
class Bins:
    """Histogram with bins of the same width in logarithm, because latencies differ so much."""

    edges: list[float]
    counts: list[int]


def make_bins(values: Iterable[float], num_bins: int = NUM_BINS) -> Bins:
    """Count values; zeros are counted with the smallest positive value."""
    given = list(values)
    positive = [value for value in given if value > 0]
    if not positive:
        return Bins([], [])
    low, high = min(positive), max(positive)
    if high <= low:
        return Bins([low, high], [len(given)])
    step = math.log(high / low) / num_bins
    counts = [0] * num_bins
    for value in given:
        index = math.floor(math.log(max(value, low) / low) / step)
        counts[min(index, num_bins - 1)] += 1
    return Bins([low * math.exp(step * index) for index in range(num_bins)] + [high], counts)


def describe(values: Iterable[float]) -> dict[str, float | list[float] | None]:
    """Return count, mean, extremes and quantiles, the median and the 99th percentile with intervals."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0}
    figures: dict[str, float | list[float] | None] = {
        "count": len(ordered),
        "mean": mean(ordered),
        "min": ordered[0],
        "max": ordered[-1],
    }
    for name, share in QUANTILES.items():
        figures[name] = quantile(ordered, share)
        interval = quantile_interval(ordered, share)
        figures[f"{name}_interval"] = None if interval is None else list(interval)
    return figures
