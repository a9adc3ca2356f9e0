"""A rehearsal of `python -m bench.apis` with few streams, and its table from known times."""

from argparse import Namespace
from pathlib import Path

import pytest

from bench import apis
from bench.api_clients import APIS
from bench.apis import Sample, format_samples
from bench.service import BenchError
from tests.support.router.model_of_shard import column
from tgis.pb import shard_pb2 as pb

# Benches are no part of the service: make test-all runs their tests.
pytestmark = pytest.mark.slow


def test_all_streams_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apis, "STEP_S", 0.002)
    monkeypatch.setattr(apis, "GATHER_S", 0.02)
    monkeypatch.setattr(apis, "SLACK", 20)
    names = list(APIS)
    with apis.running(tmp_path, 4, names) as bench:
        samples = apis.run(bench, Namespace(streams=[3], apis=names, rounds=1, steps=20))
    assert [(each.api, each.streams, each.tokens) for each in samples] == [(api, 3, 60) for api in names]
    for each in samples:
        assert each.wall_s >= 20 * 0.002
        assert each.token_us < 5000


def test_a_run_of_too_few_steps_is_no_figure() -> None:
    tokens = apis.RandomTokens()
    tokens.watch(3, 60)
    for result in (tokens.result, tokens.rest):
        with pytest.raises(BenchError, match="too few"):
            result()


def test_the_rest_is_all_after_the_warm_up() -> None:
    """Two streams, one of which begins three steps later, and so ends later."""
    tokens = apis.RandomTokens(is_fast=True)
    tokens.watch(2, 0)
    late, num_new, limit = 3, apis.WARM_STEPS + 20, 4 + apis.WARM_STEPS + 20
    lengths = {0: 4, 1: 4}
    for step in range(late + num_new):
        opened = [row for row in (0, 1) if step == row * late]
        rows = [row for row in (0, 1) if step >= row * late and lengths[row] < limit]
        request = pb.StepRequest(rows=column(rows), ends=column([lengths[row] for row in rows]))
        for row in opened:
            request.opened_rows.add(row=row, token_ids=column([0] * 4), prompt_len=4, max_new_tokens=num_new)
        tokens.execute(request)
        for row in rows:
            lengths[row] += 1
    times, num_tokens = tokens.rest()
    assert num_tokens == 2 * num_new - late - 2 * apis.WARM_STEPS
    assert times.cpu_s == ()
    assert times.wall_s > 0


def test_times_and_ratios() -> None:
    seconds = {"grpc": (0.1, 0.3, 0.2), "chat": (0.3, 0.1, 0.2)}
    samples = [Sample(api, 64, cpu_s, 1.0, 1000) for api, all_s in seconds.items() for cpu_s in all_s]
    samples += [Sample("chat", 256, 0.5, 1.0, 1000)]
    assert format_samples(samples).splitlines()[2:] == [
        "| 64 | grpc | 200.0 (100.0 to 300.0) |  |  |",
        "| 64 | chat | 200.0 (100.0 to 300.0) | 1.00 | <= 1.2 |",
        "| 256 | chat | 500.0 (500.0 to 500.0) |  |  |",
    ]
