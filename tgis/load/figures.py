"""Computes the figures of a run, or of several repeats of it, from the records of the answers."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from tgis.load.errors import LoadError
from tgis.load.processes import RunRecord
from tgis.load.records import AnswerRecord
from tgis.load.statistics import describe, make_bins, mean, mean_interval, quantile

Figures = dict[str, Any]
SEED_FAULT = "repeated seed, other text"
OBJECTIVES: dict[str, Callable[[AnswerRecord], float | None]] = {
    "ttft": lambda record: record.first_token_s,
    "itl": lambda record: record.token_s,
    "total": lambda record: record.total_s,
}
"""What `--slo` can limit, per request."""
RATES = ("requests_per_s", "output_tokens_per_s", "input_tokens_per_s", "goodput_per_s")
MAX_CPU_SHARE = 0.85
MAX_DELAY_S = 0.02  # 99th percentile of delays and of late sends of a generator that is not the bottleneck


def parse_objectives(text: str) -> dict[str, float]:
    """Read `ttft=0.5,itl=0.05`, in seconds. Raises LoadError."""
    limits = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            limits[name.strip()] = float(value)
        except ValueError as error:
            raise LoadError(f"{part!r} is not NAME=SECONDS") from error
    if unknown := limits.keys() - OBJECTIVES.keys():
        raise LoadError(f"{', '.join(sorted(unknown))} cannot be an objective; {', '.join(OBJECTIVES)} can")
    return limits


def is_good(record: AnswerRecord, objectives: Mapping[str, float]) -> bool:
    """Return True if a request succeeded and met all objectives.

    An answer of one token has no time between tokens, and meets any limit on it."""
    if not record.is_complete:
        return False
    values = ((OBJECTIVES[name](record), limit) for name, limit in objectives.items())
    return all(value is None or value <= limit for value, limit in values)


def measure_rates(
    records: Sequence[AnswerRecord], window_s: float, objectives: Mapping[str, float]
) -> Figures:
    """Return what was finished per second in the window from the start of the run."""
    ended = [record for record in records if record.is_complete and record.ended <= window_s]
    num_tokens = sum(_tokens_until(record, window_s) for record in records)
    good = [record for record in ended if is_good(record, objectives)]
    return {
        "window_s": window_s,
        "requests_per_s": len(ended) / window_s,
        "output_tokens_per_s": num_tokens / window_s,
        "input_tokens_per_s": sum(record.input_tokens for record in ended) / window_s,
        "goodput_per_s": len(good) / window_s,
    }


def _tokens_until(record: AnswerRecord, window_s: float) -> int:
    counts = (count for at, count in zip(record.arrivals, record.counts, strict=True) if at <= window_s)
    return max(counts, default=0)


def window_of(run: RunRecord, duration_s: float | None) -> float:
    """Return the seconds over which rates are counted: the duration, or until the last answer."""
    last = max((record.ended for record in run.records), default=run.elapsed_s)
    return min(duration_s, run.elapsed_s) if duration_s is not None else max(last, 1e-9)


def latencies(records: Iterable[AnswerRecord]) -> dict[str, list[float]]:
    """Return the values of each latency: per request, and between messages for `itl`."""
    answered = [record for record in records if record.is_complete]
    return {
        "ttft": [record.first_token_s for record in answered if record.first_token_s is not None],
        "itl": [gap for record in answered for gap in _gaps(record)],
        "tpot": [record.token_s for record in answered if record.token_s is not None],
        "total": [record.total_s for record in answered],
    }


def _gaps(record: AnswerRecord) -> Iterable[float]:
    return (after - before for before, after in pairwise(record.arrivals))


def find_seed_faults(records: Sequence[AnswerRecord]) -> list[AnswerRecord]:
    """Return the answers that differ from the first one with the same content and seed."""
    first: dict[tuple[int, int], str] = {}
    compared = (record for record in records if record.is_complete and record.digest is not None)
    return [one for one in compared if first.setdefault(one.content, one.digest or "") != one.digest]


def summarize_level(
    runs: Sequence[RunRecord], duration_s: float | None, objectives: Mapping[str, float]
) -> Figures:
    """Return the figures of repeats: latencies of all their answers, and means of their rates."""
    repeats = [measure_rates(run.records, window_of(run, duration_s), objectives) for run in runs]
    records = [record for run in runs for record in run.records]
    values = latencies(records)
    rates = {name: [repeat[name] for repeat in repeats] for name in RATES}
    intervals = {name: mean_interval(numbers) for name, numbers in rates.items()}
    return {
        **{name: mean(numbers) for name, numbers in rates.items()},
        "intervals": {name: each and list(each) for name, each in intervals.items()},
        **{name: describe(numbers) for name, numbers in values.items()},
        "histograms": {name: asdict(make_bins(numbers)) for name, numbers in values.items()},
        **_count(records, objectives),
        "generator": _generator(runs),
        "repeats": repeats,
    }


def _count(records: Sequence[AnswerRecord], objectives: Mapping[str, float]) -> Figures:
    answered = [record for record in records if record.is_complete]
    faults = Counter(fault for record in answered for fault in record.faults)
    if num_seed_faults := len(find_seed_faults(records)):
        faults[SEED_FAULT] = num_seed_faults
    cached = [record.cached_tokens for record in answered if record.cached_tokens is not None]
    num_inputs = sum(record.input_tokens for record in answered if record.cached_tokens is not None)
    return {
        "requests": len(records),
        "succeeded": len(answered),
        "good_share": sum(is_good(one, objectives) for one in records) / len(records) if records else 0.0,
        "cancelled": sum(record.is_cancelled for record in records),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
        "messages": {record.error: record.message for record in reversed(records) if record.message},
        "faults": dict(faults),
        "input_tokens": mean([one.input_tokens for one in answered]) if answered else 0.0,
        "output_tokens": mean([one.output_tokens for one in answered]) if answered else 0.0,
        "cached_tokens": sum(cached) if cached else None,
        "cached_share": sum(cached) / num_inputs if num_inputs else None,
    }


def _generator(runs: Sequence[RunRecord]) -> Figures:
    """Return how busy the load processes were, and what makes them a bottleneck."""
    late = sorted(max(0.0, one.sent - one.intended) for run in runs for one in run.records)
    delays = sorted(delay for run in runs for delay in run.delays)
    figures = {
        "cpu_share": max((share for run in runs for share in run.cpu_shares), default=0.0),
        "late_p99_s": quantile(late, 0.99) if late else 0.0,
        "delay_p99_s": quantile(delays, 0.99) if delays else 0.0,
    }
    return {**figures, "bottleneck": _bottleneck(figures)}


def _bottleneck(figures: Mapping[str, float]) -> str | None:
    if figures["cpu_share"] > MAX_CPU_SHARE:
        return f"a load process used {figures['cpu_share']:.0%} of a core"
    if figures["late_p99_s"] > MAX_DELAY_S:
        return f"1 % of the requests were sent more than {figures['late_p99_s'] * 1000:.0f} ms late"
    if figures["delay_p99_s"] > MAX_DELAY_S:
        return f"1 % of the answers may have been read more than {figures['delay_p99_s'] * 1000:.0f} ms late"
    return None
