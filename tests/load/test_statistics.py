"""Statistics in plain Python, compared with numpy's."""

import numpy as np
import pytest

from tgis.load import statistics

SAMPLES = {
    "one": [3.0],
    "two": [1.0, 2.0],
    "ties": [2.0] * 7 + [5.0] * 6,
    "skewed": np.random.default_rng(1).lognormal(size=1003).tolist(),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_descriptions_are_numpys(name: str) -> None:
    values = SAMPLES[name]
    described = statistics.describe(values)
    assert described["count"] == len(values)
    for key, expected in {
        "mean": np.mean(values),
        "min": np.min(values),
        "max": np.max(values),
        **{key: np.quantile(values, share) for key, share in statistics.QUANTILES.items()},
    }.items():
        assert described[key] == pytest.approx(float(expected), rel=1e-12)
    if len(values) > 1:
        assert statistics.standard_deviation(values) == pytest.approx(float(np.std(values, ddof=1)))


def test_nothing_is_described_as_nothing() -> None:
    assert statistics.describe([]) == {"count": 0}


def test_bins_count_as_numpys_histogram() -> None:
    values = SAMPLES["skewed"]
    bins = statistics.make_bins(values, 20)
    counts, edges = np.histogram(np.log(values), bins=20)
    assert bins.counts == counts.tolist()
    assert np.log(bins.edges) == pytest.approx(edges)


def test_bins_of_equal_values_and_of_zeros() -> None:
    assert statistics.make_bins([2.0, 2.0]).counts == [2]
    assert statistics.make_bins([0.0]).counts == []
    assert sum(statistics.make_bins([0.0, 1.0, 4.0], 4).counts) == 3


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_intervals_of_quantiles_contain_the_true_one_as_often_as_they_say(share: float) -> None:
    random = np.random.default_rng(2)
    true = -np.log(1 - share)  # of the exponential distribution
    intervals = [
        statistics.quantile_interval(np.sort(random.exponential(size=400)).tolist(), share)
        for _ in range(800)
    ]
    hits = [low <= true <= high for low, high in filter(None, intervals)]
    assert len(hits) == 800
    assert 0.93 <= np.mean(hits) <= 0.985


def test_a_quantile_beyond_the_sample_has_no_interval() -> None:
    assert statistics.quantile_interval([1.0, 2.0, 3.0], 0.99) is None


@pytest.mark.parametrize("count", [2, 5, 31, 40])
def test_intervals_of_means_contain_the_true_one_as_often_as_they_say(count: int) -> None:
    samples = np.random.default_rng(count).normal(3.0, 1.0, size=(2000, count))
    intervals = [statistics.mean_interval(sample.tolist()) for sample in samples]
    hits = [low <= 3.0 <= high for low, high in filter(None, intervals)]
    assert len(hits) == 2000
    assert 0.935 <= np.mean(hits) <= 0.965


def test_the_width_of_repeats() -> None:
    assert statistics.relative_half_width([1.0]) == float("inf")
    assert statistics.relative_half_width([2.0, 2.0]) == 0
    assert statistics.relative_half_width([9.0, 11.0]) == pytest.approx(
        12.7062 * np.sqrt(2) / np.sqrt(2) / 10
    )
