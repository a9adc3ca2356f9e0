"""`--quantize int8` and `--cpu-arithmetic bfloat16` on every family, against transformers in float32. `make
test` runs one case of each family that is not in COVERED_BY with int8."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.family_cases.all import CASES, COVERED_BY, family_of
from tests.support.shard.family_oracle import NEW_TOKENS, draw_inputs, load_model
from tgis.shard.startup.load import load

# Mean error of logprobs for small random models.
TOLERANCES = {"int8": 0.1, "bfloat16": 0.05}
# Unscaled attention scores amplify errors of queries; rounded scores choose other experts.
WIDE = {
    "mt5": 2,
    "glm4_moe": 2,
    "gemma4_text": 4,
    "gemma4_text_experts": 2,
    "mistral3_mistral4": 2,
    "qwen3_next_some_dense_biases": 2,
    "qwen3_5_moe_text": 2,
    "qwen3_5_moe_multimodal": 3,
}
OPTIONS = {"int8": {"quantize": "int8"}, "bfloat16": {"cpu_arithmetic": "bfloat16"}}


def plan() -> Iterator[object]:
    """Yield every case; all are slow but the first with int8 of each family that is not in COVERED_BY."""
    met = {*COVERED_BY}
    for kept, name in itertools.product(OPTIONS, CASES):
        family = family_of(name)
        is_slow = kept != "int8" or family in met
        yield pytest.param(name, kept, marks=[pytest.mark.slow] if is_slow else [])
        met.add(family)


@torch.inference_mode()
def expected_logprobs(model: Any, request: Request) -> Tensor:
    """Return transformers' log-probabilities of the tokens that were generated."""
    chosen = torch.tensor(request.generated)
    ids = torch.tensor([request.prompt + request.generated[:-1]])
    if request.encoder_token_ids:
        out = model(input_ids=torch.tensor([request.encoder_token_ids]), decoder_input_ids=ids)
    else:
        out = model(input_ids=ids)
    logprobs = out.logits[0, len(request.prompt) - 1 :].float().log_softmax(-1)
    return logprobs.gather(1, chosen[:, None])[:, 0]


@pytest.mark.parametrize(("name", "kept"), [*plan()])
def test_is_near_float32(name: str, kept: str, tmp_path: Path) -> None:
    config = CASES[name]()
    write_model(tmp_path, config)
    model = load_model(tmp_path, config)
    runner = load(configure(tmp_path, **OPTIONS[kept]))
    assert runner.info.weight_dtype == kept
    start = [model.generation_config.decoder_start_token_id] if config.is_encoder_decoder else []
    requests = [
        Request(start or ids, NEW_TOKENS, encoder_token_ids=ids if start else [], details={"logprobs": True})
        for ids in draw_inputs()
    ]
    Router(runner, seed=1).run(list(requests))
    actual = torch.tensor([one for request in requests for one in request.logprobs])
    expected = torch.cat([expected_logprobs(model, request) for request in requests])
    difference = (actual - expected).abs()
    assert 0 < difference.mean() < TOLERANCES[kept] * WIDE.get(name, 1)
