"""Computes rates, means, shares and quantiles (as Prometheus' histogram_quantile) between two scrapes."""

import math
from collections import deque
from dataclasses import dataclass

from tgis.cli.top.scrape import Scrape


@dataclass(frozen=True, eq=False)
class Window:
    """Two scrapes of a process, the earlier first, or the same scrape twice. Divisions by zero give None."""

    begin: Scrape
    end: Scrape

    @property
    def seconds(self) -> float:
        return self.end.at - self.begin.at

    def increase(self, name: str, **labels: str) -> float:
        return self.end.value(name, **labels) - self.begin.value(name, **labels)

    def rate(self, *names: str, **labels: str) -> float | None:
        """Return the increase per second of the series together."""
        return sum(self.increase(name, **labels) for name in names) / self.seconds if self.seconds else None

    def rates_by(self, name: str, label: str) -> dict[str, float]:
        """Return the rate for each value of the label, without rates of 0."""
        values = sorted({dict(labels)[label] for labels in self.end.samples.get(name, {})})
        rates = {value: self.rate(name, **{label: value}) for value in values}
        return {value: rate for value, rate in rates.items() if rate}

    def share(self, part: str, whole: str) -> float | None:
        divisor = self.increase(whole)
        return self.increase(part) / divisor if divisor else None

    def mean(self, histogram: str, **labels: str) -> float | None:
        count = self.increase(f"{histogram}_count", **labels)
        return self.increase(f"{histogram}_sum", **labels) / count if count else None

    def quantile(self, q: float, histogram: str, **labels: str) -> float | None:
        name = f"{histogram}_bucket"
        counts: dict[float, float] = {}
        for scrape, sign in ((self.end, 1), (self.begin, -1)):
            for bucket, count in scrape.select(name, **labels).items():
                end = float(dict(bucket)["le"])
                counts[end] = counts.get(end, 0.0) + sign * count
        return quantile_of(q, sorted(counts.items()))


def quantile_of(q: float, buckets: list[tuple[float, float]]) -> float | None:
    """Return the quantile `q` of a histogram, interpolated linearly; None without observations.

    `buckets` are pairs of upper bound and cumulative count; the last bound is infinite. The first bucket
    begins at 0. A quantile in the last bucket is the largest finite bound."""
    assert q > 0, "the quantile 0 is not defined"
    if len(buckets) < 2 or not buckets[-1][1]:
        return None
    rank = q * buckets[-1][1]
    last = len(buckets) - 1
    index = next((i for i in range(last) if buckets[i][1] >= rank), last)
    if index == last:
        return buckets[last - 1][0]
    end, count = buckets[index]
    begin, before = buckets[index - 1] if index else (0.0, 0.0)
    assert math.isfinite(end), "only the last bucket has no finite bound"
    return begin + (end - begin) * ((rank - before) / (count - before))


class History:
    """Recent scrapes of one process, for a window of about `seconds`; reset when the process restarts."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._scrapes: deque[Scrape] = deque()

    def forget(self) -> None:
        """Drop all scrapes, because another process may answer next."""
        self._scrapes.clear()

    def push(self, scrape: Scrape) -> Window | None:
        """Add a scrape and return the window that ends with it; None for a process's first scrape."""
        if self._scrapes and has_restarted(self._scrapes[-1], scrape):
            self._scrapes.clear()
        self._scrapes.append(scrape)
        while len(self._scrapes) > 2 and scrape.at - self._scrapes[1].at >= self._seconds:
            self._scrapes.popleft()
        return Window(self._scrapes[0], scrape) if len(self._scrapes) > 1 else None


def has_restarted(before: Scrape, after: Scrape) -> bool:
    """Return True if a counter decreased or disappeared."""
    counters = (name for name in before.samples if name.endswith(("_total", "_bucket")))
    return any(
        after.samples.get(name, {}).get(labels, -1.0) < value
        for name in counters
        for labels, value in before.samples[name].items()
    )
