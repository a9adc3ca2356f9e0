"""A rehearsal of `python -m bench.fast_streams` with few streams, and its table from known figures."""

from argparse import Namespace
from pathlib import Path

import pytest

from bench import apis, fast_streams
from bench.api_clients import CHAT, GRPC
from bench.fast_streams import AFTER, BEFORE, Contender, FastSample, format_samples

# Benches are no part of the service: make test-all runs their tests.
pytestmark = pytest.mark.slow


def test_whole_streams_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apis, "GATHER_S", 0.02)
    monkeypatch.setattr(fast_streams, "SLACK", 20)
    tokens, names = apis.RandomTokens(is_fast=True), [GRPC, CHAT]
    with apis.running(tmp_path, 4, names, tokens) as bench:
        options = Namespace(streams=[3], apis=names, rounds=1, new_tokens=90)
        samples = fast_streams.run([Contender(AFTER, bench, tokens)], options)
    assert [(each.tree, each.api, each.streams) for each in samples] == [(AFTER, api, 3) for api in names]
    for each in samples:
        assert 0 < each.token_us < 20_000
        assert each.rate > 0
        assert each.message_tokens > 0.5


def test_ratios_are_of_rounds() -> None:
    rates = {BEFORE: (100.0, 400.0, 200.0), AFTER: (200.0, 400.0, 600.0)}
    samples = [
        FastSample(tree, GRPC, 64, number, 10.0, rate, 2.0)
        for tree, values in rates.items()
        for number, rate in enumerate(values)
    ]
    assert format_samples(samples).splitlines()[2:] == [
        "| 64 | grpc | before | 200 | 10.0 | 2.0 |  |",
        "| 64 | grpc | this tree | 400 | 10.0 | 2.0 | 2.00 (1.00 to 3.00) |",
    ]
