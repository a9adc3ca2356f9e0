"""Models whose products of few rows are those of `multiply_few`, on an emulated device, captured: norms add
the parts of its sums."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.support.cuda.capturing_device import CapturingDevice
from tests.support.cuda.late_platform import late_platform
from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request, Router, configure, prompts
from tests.support.shard.family_cases.all import CASES, runs_on_gpus
from tgis.pb import shard_pb2 as pb
from tgis.shard.kernels.cuda.few_rows import multiply_few
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.load import load

SIZES = {"dtype": "float32", "kv_cache_tokens": 2048, "block_size": 4, "max_step_tokens": 64}
TOLERANCE = 2e-4  # of log-probabilities in float32
QUICK = ("llama_grouped_queries",)


@pytest.fixture(autouse=True)
def narrow_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply the columns of small models in parts."""
    monkeypatch.setattr(multiply_few, "TILE", 8)
    monkeypatch.setattr(multiply_few, "MIN_TILES", 1)


def answer(runner: ModelRunner, wants_details: bool, encodes: bool, is_captured: bool) -> list[Request]:
    """Return greedy answers to the same prompts."""
    details = {"logprobs": True} if wants_details else {}
    inputs = prompts(3, 6, longest=20)
    if encodes:
        requests = [Request([2], 8, details=details, encoder_token_ids=ids) for ids in inputs]
    else:
        requests = [Request(ids, 8, details=details) for ids in inputs]
    runner.reset()
    router = Router(runner, seed=1, depth=3)
    router.run(list(requests))
    assert (pb.STEP_PATH_GRAPH in {response.path for response in router.responses}) == is_captured
    return requests


def count_parts(uses: list[int], *args: Any) -> Tensor:
    """Do what `multiply_few` does, and add the number of parts to `uses`."""
    result = multiply_few.plain(*args)
    if result.dim() == 3:
        uses.append(len(result))
    return result


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in QUICK else pytest.mark.slow)
        for case in filter(runs_on_gpus, CASES)
    ],
)
def test_every_family(case: str, tmp_path: Path) -> None:
    """Results equal those of cuBLAS's place, not captured, whatever a model does between a product and
    the next norm."""
    config = CASES[case]()
    write_model(tmp_path, config)
    uses: list[int] = []
    kernels = replace(Implementations.plain(), multiply_few=partial(count_parts, uses))
    few = load(
        configure(tmp_path, **SIZES, cuda_graphs="8"),
        on=late_platform(CapturingDevice(), kernels, uses_few=True),
    )
    assert max(uses, default=2) > 1
    other = load(configure(tmp_path, **SIZES, cuda_graphs="0"), on=late_platform(CapturingDevice()))
    for wants_details in (False, True):
        mine, theirs = (
            answer(each, wants_details, config.is_encoder_decoder, is_captured=each is few)
            for each in (few, other)
        )
        for one, expected in zip(mine, theirs, strict=True):
            assert one.generated == expected.generated
            assert one.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE, nan_ok=not wants_details)
    if case in QUICK:
        assert uses
