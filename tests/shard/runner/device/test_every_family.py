"""Every kind of model on a late device, by the kernels' twins, against transformers: with tokens that the device
samples, and with details, which the host computes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.cuda.runners import load_captured
from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.family_oracle import NEW_TOKENS, Answer, Oracle, check, draw_inputs
from tests.support.shard.portable import fusing
from tgis.pb import shard_pb2 as pb
from tgis.shard.models.interface import ModelSpec
from tgis.shard.models.spec import DecoderSpec

CPU = torch.device("cpu")
# Norms before, after and around branches, of sums, shared and parallel; experts; encoders; long positions.
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
    small = {"dtype": "float32", "kv_cache_tokens": 2048, "block_size": 4, "max_step_tokens": 64}
    runner = load_captured(configure(tmp_path, **small), on=on)
    runner.reset()
    bare, detailed = ([ask(answer, start, wanted) for answer in answers] for wanted in (False, True))
    router = Router(runner, seed=1, depth=3)
    router.run(list(bare))
    assert pb.STEP_PATH_GRAPH in {response.path for response in router.responses}
    runner.reset()
    mixed = [ask(answer, start, wants_details=False) for answer in answers]
    Router(runner, seed=2).run([*detailed, *mixed])
    for request, answer in zip([*bare, *mixed, *detailed], answers * 3, strict=True):
        if request.details:
            check(request, answer)
        assert answer.certain
        assert request.generated[: answer.certain] == answer.token_ids[: answer.certain]
    assert on.kernels.num_fused["norm_product"] > 0
    assert (on.kernels.num_fused["product_add"] > 0) == adds_products(runner.model.spec)


def ask(answer: Answer, start: list[int], wants_details: bool) -> Request:
    return Request(
        start or answer.input_ids,
        NEW_TOKENS,
        details={"logprobs": True} if wants_details else {},
        encoder_token_ids=answer.input_ids if start else [],
    )


def adds_products(spec: ModelSpec) -> bool:
    """Unless all branches' outputs are changed before they are added."""
    if not isinstance(spec, DecoderSpec):
        return True
    return spec.norm_place in ("before", "sum") and spec.residual_scale == 1
