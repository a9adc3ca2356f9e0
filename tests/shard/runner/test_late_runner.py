"""A second model runner behind the same interface answers as transformers does: it is a step behind, attends
in plain torch operators, and fuses the layers of small steps. `make test` runs every kind of block."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.family_oracle import NEW_TOKENS, Oracle, check, draw_inputs
from tests.support.shard.late_runner import LateRunner
from tests.support.shard.portable import fusing
from tgis.shard.models.interface import ModelSpec
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.startup.load import load

CPU = torch.device("cpu")
DETAILS = {"logprobs": True, "ranks": True}
# Norms before, after and around branches, of sums, shared and parallel; experts; encoders.
QUICK = {"llama_tied", "olmo2", "gemma2", "opt_350m", "falcon_7b", "gpt_neox", "granitemoe", "t5", "bart"}


def plan() -> Iterator[object]:
    for case in CASES:
        yield pytest.param(case, marks=[] if case in QUICK else [pytest.mark.slow])


def test_every_kind_of_block_is_quick() -> None:
    assert CASES.keys() >= QUICK


@pytest.mark.parametrize("case", list(plan()))
def test_equals_transformers(case: str, tmp_path: Path) -> None:
    config, on = CASES[case](), fusing(CPU)
    write_model(tmp_path, config)
    oracle = Oracle(tmp_path, config)
    start = [oracle.start_token_id] if oracle.is_encoder_decoder else []
    answers = [oracle.answer(ids) for ids in draw_inputs()]
    requests = [
        Request(
            start or answer.input_ids,
            NEW_TOKENS,
            details=DETAILS,
            encoder_token_ids=answer.input_ids if start else [],
        )
        for answer in answers
    ]
    small = {"dtype": "float32", "kv_cache_tokens": 2048, "block_size": 4, "max_step_tokens": 64}
    runner = LateRunner(load(configure(tmp_path, **small), on=on))
    runner.reset()
    Router(runner, seed=1, depth=3).run(list(requests))
    runner.close()
    for request, answer in zip(requests, answers, strict=True):
        check(request, answer)
    assert runner.most_pending == 2
    assert on.kernels.num_fused["norm_product"] > 0
    assert (on.kernels.num_fused["product_add"] > 0) == adds_products(runner.model.spec)


def adds_products(spec: ModelSpec) -> bool:
    """Unless all branches' outputs are changed before they are added."""
    if not isinstance(spec, DecoderSpec):
        return True
    return spec.norm_place in ("before", "sum") and spec.residual_scale == 1
