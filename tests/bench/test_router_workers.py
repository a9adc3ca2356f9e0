"""A rehearsal of `python -m bench.router_workers` with few streams, and its tables from known figures."""

from argparse import Namespace

import pytest

from bench import apis, router_latency, router_losses, router_rates, router_spread, router_workers
from bench.router_latency import Latency, format_latencies
from bench.router_losses import format_losses
from bench.router_rates import Rate, format_rates
from bench.router_spread import format_spread
from bench.router_workers import ONE, Cost, format_costs
from tgis.load.records import AnswerRecord

# Benches are no part of the service: make test-all runs their tests.
pytestmark = pytest.mark.slow


def cells(table: str) -> list[list[str]]:
    """Return the texts between the bars, without the head."""
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:] if line.startswith("|")]


def test_costs_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEP_S": 0.002, "GATHER_S": 0.02, "SLACK": 20}.items():
        monkeypatch.setattr(apis, name, value)
    monkeypatch.setattr(router_workers, "NUM_WORKERS", {ONE: 0, "engine + 2 workers": 2})
    options = Namespace(streams=[3], rounds=1, steps=20, before=None)
    one, split = cells(router_workers.measure_costs(options))
    assert (one[:2], split[:2]) == (["3", ONE], ["3", "engine + 2 workers"])
    assert one[3].strip() == ""
    assert all(0 < float(text.split()[0]) < 20_000 for text in (one[2], *split[2:5]))


@pytest.mark.slow
def test_spread_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_spread, "NUM_WORKERS", 2)
    monkeypatch.setattr(router_spread, "NUM_CONNECTIONS", (1, 8))
    monkeypatch.setattr(router_spread, "NUM_TRIALS", 2)
    single, several = cells(router_spread.measure(Namespace()))
    assert single == ["1", "0, 64", "2.00 (2.00 to 2.00)"]
    assert sum(float(each) for each in several[1].split(", ")) == 64


@pytest.mark.slow
def test_latency_and_a_killed_engine_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NUM_CALLS": 5, "NEW_TOKENS": 20}.items():
        monkeypatch.setattr(router_latency, name, value)
    monkeypatch.setattr(apis, "STEP_S", 0.002)
    call, token = cells(router_latency.measure(Namespace(rounds=1)))
    assert 0 < float(call[1].split()[0]) < 1000
    assert float(token[2].split()[0]) >= 2
    small = {"NUM_WORKERS": 2, "NUM_STREAMS": 3, "NUM_KILLS": 1, "NEW_TOKENS": 60, "KILL_AFTER_S": 0.6}
    for name, value in small.items():
        monkeypatch.setattr(router_losses, name, value)
    [[_, num_streams, longest, _, num_wrong]] = cells(router_losses.measure(Namespace()))
    assert (num_streams, num_wrong) == ("3", "0")
    assert float(longest) > 5 * router_losses.STEP_S


@pytest.mark.slow
def test_rates_are_measured_where_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_rates, "count_cores", lambda: 7)
    assert router_rates.measure(Namespace()).startswith("Not measured: 7 cores")
    for name, value in {"count_cores": lambda: 8, "NUM_STREAMS": 4, "NEW_TOKENS": 100}.items():
        monkeypatch.setattr(router_rates, name, value)
    rows = cells(router_rates.measure(Namespace(rounds=1)))
    assert [row[:2] for row in rows] == [
        ["router", "1"],
        ["router", "2"],
        ["gRPC alone", "1"],
        ["gRPC alone", "2"],
    ]
    assert all(float(row[2]) > 0 for row in rows)


def test_rates_are_shares_of_rounds() -> None:
    rates = [Rate("router", 1, number, rate) for number, rate in enumerate((100.0, 200.0))]
    rates += [Rate("router", 4, number, rate) for number, rate in enumerate((400.0, 400.0))]
    one, several = cells(format_rates(rates))
    assert (one[2], several[2:]) == ("150", ["400", "0.75 (0.50 to 1.00)", ">= 0.8"])


def test_costs_are_compared_in_rounds() -> None:
    costs = [Cost(ONE, 64, number, us, 0.0) for number, us in enumerate((50.0, 100.0, 60.0))]
    costs += [Cost("engine + 1 worker", 64, i, us, 10.0) for i, us in enumerate((50.0, 80.0, 50.0))]
    assert cells(format_costs(costs)) == [
        ["64", ONE, "60.0 (50.0 to 100.0)", "", "60.0 (50.0 to 100.0)"],
        [
            "64",
            "engine + 1 worker",
            "50.0 (50.0 to 80.0)",
            "10.0 (10.0 to 10.0)",
            "60.0 (60.0 to 90.0)",
            "1.00 (0.90 to 1.20)",
        ],
    ]


def test_latency_is_compared_in_rounds() -> None:
    values = {ONE: ((2.0, 20.0), (5.0, 20.5)), "engine + 1 worker": ((2.5, 20.0), (5.25, 20.0))}
    latencies = [
        Latency(name, number, *pair) for name, pairs in values.items() for number, pair in enumerate(pairs)
    ]
    call, token = cells(format_latencies(latencies))
    assert (call[3], token[3]) == ("0.38 (0.25 to 0.50)", "-0.25 (-0.50 to 0.00)")


def test_texts_that_differ_and_pauses_are_counted() -> None:
    def stream(text: str, arrivals: list[float]) -> AnswerRecord:
        return AnswerRecord(0, 0, 0.0, 0.0, 3, arrivals, [1, 2, 3], digest=text)

    lost = [stream(text, [1.0, 1.5, 3.5]) for text in ("ab", "cd")]
    lost.append(stream("ef", [1.0, 1.25, 1.5]))
    assert cells(format_losses([["ab", "cd", "xf"]], [lost])) == [["1", "3", "2.00", "2.00", "1"]]


def test_a_share_is_that_of_the_busiest_worker() -> None:
    [row] = cells(format_spread({4: [[1, 3, 0], [2, 1, 1], [0, 0, 4]]}))
    assert row == ["4", "0, 16, 48", "2.25 (1.50 to 3.00)"]
