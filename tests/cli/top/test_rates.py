"""Values computed from two scrapes, against numpy's interpolation and real histograms of the router."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgis.cli.top.rates import History, Window, has_restarted, quantile_of
from tgis.cli.top.scrape import Scrape, parse
from tgis.router.metrics.metrics import MetricLimits, Metrics

COUNTS = st.lists(st.integers(1, 50), min_size=1, max_size=12)


def metrics() -> Metrics:
    return Metrics(MetricLimits(64, 32, 4))


def scrape(at: float, shown: Metrics) -> Scrape:
    return Scrape(at, parse(shown.render().decode()))


@given(counts=COUNTS, q=st.floats(0.01, 1.0))
def test_a_quantile_is_interpolated_between_the_ends_of_buckets(counts: list[int], q: float) -> None:
    ends = [1.5**k for k in range(len(counts))]
    cumulated = np.cumsum(counts)
    buckets = [*zip(ends, map(float, cumulated), strict=True), (math.inf, float(cumulated[-1]))]
    expected = np.interp(q * cumulated[-1], [0, *cumulated], [0, *ends])
    assert quantile_of(q, buckets) == pytest.approx(expected)


def test_quantiles_at_the_edges() -> None:
    assert quantile_of(0.5, []) is None
    assert quantile_of(0.5, [(1.0, 0.0), (math.inf, 0.0)]) is None
    assert quantile_of(0.5, [(1.0, 0.0), (2.0, 0.0), (math.inf, 7.0)]) == 2.0, "beyond the last end"
    assert quantile_of(0.5, [(1.0, 0.0), (2.0, 8.0), (4.0, 8.0), (math.inf, 8.0)]) == 1.5


def test_a_window_counts_events_within_it() -> None:
    shown = metrics()
    shown.first_token_duration.observe(100.0)
    shown.request_failure.add("validation")
    shown.batch_size.observe(4, "prefill")
    begin = scrape(50.0, shown)
    r = random.Random(3)
    seen = [r.uniform(0.01, 1.0) for _ in range(200)]
    for value in seen:
        shown.first_token_duration.observe(value)
    shown.request_failure.add("conc_limit", amount=6)
    shown.batch_size.observe(1, "prefill")
    shown.batch_size.observe(2, "next_token")
    window = Window(begin, scrape(54.0, shown))
    name = "tgi_request_time_to_first_token_duration"
    assert window.rate(f"{name}_count") == 50.0
    assert window.mean(name) == pytest.approx(sum(seen) / 200)
    for q in (0.5, 0.95):
        # Each bucket's bound is 1.5 times the one before.
        assert window.quantile(q, name) == pytest.approx(np.quantile(seen, q), rel=0.5)
    assert window.rates_by("tgi_request_failure_total", "err") == {"conc_limit": 1.5}
    sizes = [window.mean("tgi_batch_inference_batch_size", method=m) for m in ("prefill", "next_token")]
    assert sizes == [1.0, 2.0]
    assert window.mean("tgi_batch_inference_batch_size") == 1.5
    assert window.mean("tgi_request_duration") is None
    assert window.quantile(0.5, "tgi_request_duration") is None
    assert window.share("tgi_prefix_cache_hits_total", "tgi_prefix_cache_queries_total") is None
    assert window.rate("tgi_what_an_older_service_lacks") == 0


def test_a_window_is_as_long_as_was_asked_for() -> None:
    history, shown = History(3.0), metrics()
    windows = [history.push(scrape(float(at), shown)) for at in range(6)]
    assert windows[0] is None
    assert [window.seconds for window in windows[1:] if window] == [1, 2, 3, 3, 3]
    sparse = [history.push(scrape(float(at), shown)) for at in (20, 40)]
    assert [window.seconds for window in sparse if window] == [15, 20], "never less than two looks"


def test_counters_that_go_back_begin_a_new_window() -> None:
    history, shown = History(10.0), metrics()
    shown.request_count.add("single")
    before = scrape(1.0, shown)
    assert history.push(before) is None
    assert history.push(scrape(2.0, shown)) is not None
    other = metrics()
    assert has_restarted(before, scrape(3.0, other)), "a series with labels is gone"
    other.request_count.add("single", amount=0)
    assert has_restarted(before, scrape(3.0, other)), "it went back"
    assert history.push(scrape(3.0, other)) is None
    window = history.push(scrape(5.0, other))
    assert window is not None
    assert window.seconds == 2
    assert not has_restarted(before, before)
