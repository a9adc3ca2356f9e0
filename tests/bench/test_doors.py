"""A rehearsal of `python -m bench.doors` with few streams, and its table from known times."""

from argparse import Namespace
from pathlib import Path

import pytest

from bench import doors
from bench.door_clients import APIS
from bench.doors import Sample, format_samples
from bench.service import BenchError


def test_all_streams_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "STEP_S", 0.002)
    monkeypatch.setattr(doors, "GATHER_S", 0.02)
    monkeypatch.setattr(doors, "SLACK", 20)
    apis = list(APIS)
    with doors.running(tmp_path, 4, apis) as bench:
        samples = doors.run(bench, Namespace(streams=[3], apis=apis, rounds=1, steps=20))
    assert [(each.api, each.streams, each.tokens) for each in samples] == [(api, 3, 60) for api in apis]
    for each in samples:
        assert each.wall_s >= 20 * 0.002
        assert each.token_us < 5000


def test_a_run_of_too_few_steps_is_no_figure() -> None:
    tokens = doors.RandomTokens()
    tokens.watch(3, 60)
    with pytest.raises(BenchError, match="too few"):
        tokens.result()


def test_times_and_ratios() -> None:
    seconds = {"grpc": (0.1, 0.3, 0.2), "chat": (0.3, 0.1, 0.2)}
    samples = [Sample(api, 64, cpu_s, 1.0, 1000) for api, all_s in seconds.items() for cpu_s in all_s]
    samples += [Sample("chat", 256, 0.5, 1.0, 1000)]
    assert format_samples(samples).splitlines()[2:] == [
        "| 64 | grpc | 200.0 (100.0 to 300.0) |  |  |",
        "| 64 | chat | 200.0 (100.0 to 300.0) | 1.00 | <= 1.2 |",
        "| 256 | chat | 500.0 (500.0 to 500.0) |  |  |",
    ]
