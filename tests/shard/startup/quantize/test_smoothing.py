"""Factors of norms and of the layers that read them: models with any factors give the bits of models without,
with LoRA adapters too."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.shard.checkpoints import write_model
from tests.support.shard.family_cases.all import CASES, COVERED_BY, family_of
from tests.support.shard.ranks import Ranks
from tests.support.shard.smoothed import compute
from tests.support.shard.stepping import ALONE

ENCODER_DECODERS = {"t5", "bart"}


def plan() -> Iterator[object]:
    """Yield every decoder; all are slow but the first of each family that is not in COVERED_BY."""
    met = {*COVERED_BY}
    for case in CASES:
        family = family_of(case)
        if family not in ENCODER_DECODERS:
            yield pytest.param(case, marks=[pytest.mark.slow] if family in met else [])
        met.add(family)


@pytest.mark.parametrize("case", [*plan()])
def test_factors_change_no_bit(case: str, tmp_path: Path) -> None:
    write_model(tmp_path, CASES[case]())
    results = [
        compute(ALONE, tmp_path, has_factors, has_adapter)
        for has_adapter in (False, True)
        for has_factors in (False, True)
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[2], results[3])
    assert not torch.equal(results[0], results[2])


def test_factors_change_no_bit_on_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    write_model(tmp_path, CASES["llama_grouped_queries"]())
    expected = ranks.run(2, compute, tmp_path, False, True)[0]
    for actual in ranks.run(2, compute, tmp_path, True, True):
        assert torch.equal(actual, expected)
