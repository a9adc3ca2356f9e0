"""Computes the intended send times of open loops, in seconds from the start of a run."""

import json
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Literal

from tgis.load.errors import LoadError

Process = Literal["poisson", "constant"]


def arrival_times(
    process: Process, rate: float, duration_s: float, limit: int | None, seed: int
) -> list[float]:
    """Return the times before `duration_s`, at most `limit` of them."""
    gaps = _poisson_gaps(rate, seed) if process == "poisson" else _constant_gaps(rate)
    times: list[float] = []
    now = 0.0
    for gap in gaps:
        now += gap
        if now >= duration_s or (limit is not None and len(times) >= limit):
            break
        times.append(now)
    return times


def _poisson_gaps(rate: float, seed: int) -> Iterator[float]:
    source = random.Random(seed)
    while True:
        yield source.expovariate(rate)


def _constant_gaps(rate: float) -> Iterator[float]:
    yield 0.0
    for _ in count():
        yield 1 / rate


def read_trace(path: Path, scale: float = 1.0) -> list[float]:
    """Read times from a file: a number on each line, or a JSON object with `timestamp` in seconds.

    The first time becomes 0; `scale` above 1 stretches the trace. Raises LoadError."""
    times = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"the trace {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            times.append(_read_time(line, f"{path}:{number}"))
    if not times:
        raise LoadError(f"the trace {path} has no times")
    first = min(times)
    return sorted((time - first) * scale for time in times)


def _read_time(line: str, place: str) -> float:
    try:
        value: Any = json.loads(line)
        return float(value["timestamp"] if isinstance(value, dict) else value)
    except (ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{place} is neither a number of seconds nor an object with timestamp") from error
