"""Tests the rates of ended and failed requests, of one process and of several."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tgis.router.metrics import request_rates
from tgis.router.metrics.metric_file import MetricFile
from tgis.router.metrics.metrics import MetricLimits, Metrics
from tgis.router.metrics.request_rates import RequestRates

LIMITS = MetricLimits(100, 99, 8)


class Clock:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        patch.setattr(request_rates, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def end_requests(metrics: Iterable[Metrics]) -> None:
    """End 4 + 1 + 1 inputs in each process: one refused for overload, and one that its client cancelled. A
    fifth success passed its time limit in the queue, which two counters count."""
    for each in metrics:
        each.request_success.add("eos_token", "single", amount=3)
        each.request_success.add("time_limit", "batch")
        each.request_failure.add("timeout")
        each.request_failure.add("conc_limit")
        each.request_failure.add("cancelled")


@pytest.mark.parametrize("num_processes", [1, 3])
async def test_rates_are_those_of_all_processes(tmp_path: Path, clock: Clock, num_processes: int) -> None:
    is_shared = num_processes > 1
    files = [MetricFile(tmp_path / f"{i}.metrics") if is_shared else None for i in range(num_processes)]
    metrics = [Metrics(LIMITS, storage=file) for file in files]
    rates = RequestRates(metrics[0], str(tmp_path) if is_shared else None)
    end_requests(metrics)
    assert await rates.read() == (0, 0)
    end_requests(metrics)
    clock.now += 2
    assert await rates.read() == (num_processes * 3.0, num_processes * 0.5)
    for each in metrics:
        each.close()


async def test_rates_are_those_of_the_window(clock: Clock) -> None:
    metrics = Metrics(LIMITS)
    rates = RequestRates(metrics, None)
    for _ in range(30):
        await rates.read()
        end_requests([metrics])
        clock.now += 1
    assert (await rates.read()).ended == 6
    for _ in range(11):
        clock.now += 1
        last = await rates.read()
    assert last == (0, 0)


async def test_errors_are_those_that_another_service_might_not_have(clock: Clock) -> None:
    metrics = Metrics(LIMITS)
    rates = RequestRates(metrics, None)
    await rates.read()
    for error in ("conc_limit", "generate", "queue_timeout", "token_timeout"):
        metrics.request_failure.add(error)
    for error in ("validation", "unauthenticated", "slow_reader", "tenant_limit", "cancelled"):
        metrics.request_failure.add(error)
    clock.now += 1
    assert await rates.read() == (9, 4)


async def test_counts_are_read_once_a_second(clock: Clock) -> None:
    metrics = Metrics(LIMITS)
    rates = RequestRates(metrics, None)
    await rates.read()
    end_requests([metrics])
    clock.now += 0.5
    assert await rates.read() == (0, 0)
    clock.now += 0.5
    assert await rates.read() == (6, 1)
