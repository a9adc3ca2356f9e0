"""Tests the rate of tokens with a clock of its own."""

import pytest

from tgis.router.metrics.token_rate import TokenRate


def test_a_steady_rate_is_measured_and_forgotten_after_ten_idle_seconds() -> None:
    rate = TokenRate()
    assert rate.read(5.0) == 0
    for step in range(500):
        rate.add(4, 100 + step / 50)
    assert rate.read(110.0) == pytest.approx(200, rel=0.02)
    assert 0 < rate.read(115.0) < 140
    assert rate.read(120.0) == 0


def test_a_new_rate_counts_neither_idle_time_nor_old_tokens() -> None:
    rate = TokenRate()
    rate.add(10_000, 1.0)
    for step in range(200):
        rate.add(1, 5000 + step / 100)
    assert rate.read(5002.0) == pytest.approx(100, rel=0.02)


def test_the_first_token_is_not_an_infinite_rate() -> None:
    rate = TokenRate()
    rate.add(8, 3.0)
    assert rate.read(3.0) == 8
