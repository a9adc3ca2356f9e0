"""Times at which open loops send."""

from pathlib import Path

import numpy as np
import pytest

from tgis.load.errors import LoadError
from tgis.load.workload.arrivals import arrival_times, read_trace

CRITICAL_1_PERCENT = 1.63  # of Kolmogorov and Smirnov's statistic, times the root of the count


def distance_from_exponential(gaps: np.ndarray, rate: float) -> float:
    """Return Kolmogorov and Smirnov's statistic, times the root of the count."""
    ordered = 1 - np.exp(-rate * np.sort(gaps))
    ranks = np.arange(len(gaps) + 1) / len(gaps)
    distance = max((ranks[1:] - ordered).max(), (ordered - ranks[:-1]).max())
    return float(distance * np.sqrt(len(gaps)))


@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_poisson_gaps_are_exponential(rate: float) -> None:
    times = arrival_times("poisson", rate, 20000 / rate, None, seed=5)
    assert len(times) == pytest.approx(20000, rel=0.03)
    gaps = np.diff([0.0, *times])
    assert distance_from_exponential(gaps, rate) < CRITICAL_1_PERCENT
    assert distance_from_exponential(gaps, rate * 1.05) > CRITICAL_1_PERCENT, "the test sees a rate 5 % off"
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.02


def test_constant_times_have_equal_gaps_and_begin_at_once() -> None:
    assert arrival_times("constant", 4, 1.0, None, 0) == [0.0, 0.25, 0.5, 0.75]


def test_times_depend_on_the_seed_and_end_at_the_limits() -> None:
    one, same, other = (arrival_times("poisson", 9, 5.0, 7, seed) for seed in (1, 1, 2))
    assert one == same != other
    assert len(one) == 7
    assert max(arrival_times("poisson", 50, 2.0, None, 3)) < 2.0


def test_traces_begin_at_zero_and_can_be_stretched(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text('12.5\n{"timestamp": 10, "tokens": 3}\n\n11\n')
    assert read_trace(path) == [0.0, 1.0, 2.5]
    assert read_trace(path, 2.0) == [0.0, 2.0, 5.0]


@pytest.mark.parametrize(
    ("text", "why"), [("", "no times"), ("1\nx\n", "trace:2"), ('{"time": 1}', "timestamp")]
)
def test_a_trace_without_times_is_an_error(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(LoadError, match=why):
        read_trace(path)
    with pytest.raises(LoadError, match="cannot be read"):
        read_trace(tmp_path / "none")
