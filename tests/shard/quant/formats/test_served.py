"""Quantized checkpoints of several families: transformers' greedy answers with the weights that the
libraries, or reference packers, make of the same codes."""

import re
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts import models_page
from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.family_oracle import NEW_TOKENS, Oracle, check, draw_inputs
from tests.support.shard.packed_kinds import PACKED_KINDS
from tests.support.shard.quantized_files import KINDS, write_quantized
from tests.support.shard.ranks import ALONE, Ranks
from tests.support.shard.relay import serve
from tests.support.shard.stepping import read_config
from tgis.shard.checkpoint.opening import count_elements
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.models import registry, skeleton
from tgis.shard.quant.registry import find_format

FAMILIES = ("llama_grouped_queries", "gpt2", "granitemoe", "mixtral", "falcon_40b", "t5")
# DeepSeek's own format, also for latents.
LATENT = ("fp8, a scale for each block", "deepseek_v3")
ALL_KINDS = KINDS | PACKED_KINDS
# `make test` runs each kind once, and families that stack, transpose, group and use entries of experts.
QUICK = {
    ("fp8, a scale for each matrix", "granitemoe", 2),
    ("fp8, a scale for each row", "t5", 1),
    ("fp8, a scale for each block", "llama_grouped_queries", 2),
    (*LATENT, 1),
    ("nf4", "gpt2", 2),
    ("fp4, nested", "falcon_40b", 1),
    ("int8", "mixtral", 1),
    ("gptq", "granitemoe", 2),
    ("gptq, desc_act", "llama_grouped_queries", 2),
    ("gptq_v2", "t5", 1),
    ("marlin", "gpt2", 2),
    ("awq gemm", "mixtral", 1),
    ("awq gemv", "falcon_40b", 1),
    ("pack-quantized", "t5", 2),
    ("int-quantized", "gpt2", 1),
}


def plan() -> list[object]:
    return [
        pytest.param(
            kind,
            case,
            size,
            id=f"{kind}, {case}, {size} ranks",
            marks=[] if (kind, case, size) in QUICK else [pytest.mark.slow],
        )
        for kind, case in (*product(ALL_KINDS, FAMILIES), LATENT)
        for size in (1, 2)
    ]


@pytest.mark.parametrize(("kind", "case", "size"), plan())
def test_equals_transformers(kind: str, case: str, size: int, ranks: Ranks, tmp_path: Path) -> None:
    plain, quantized, config = tmp_path / "plain", tmp_path / "quantized", CASES[case]()
    write_model(plain, config)
    write_quantized(plain, quantized, ALL_KINDS[kind])
    oracle = Oracle(plain, config)
    answers = [oracle.answer(ids) for ids in draw_inputs()]
    requests = [
        Request(
            [oracle.start_token_id] if oracle.is_encoder_decoder else answer.input_ids,
            NEW_TOKENS,
            encoder_token_ids=answer.input_ids if oracle.is_encoder_decoder else [],
            details={"logprobs": True},
        )
        for answer in answers
    ]
    crowds, _ = ranks.run(size, serve, quantized, 1, [requests], 16)[0]
    for request, answer in zip(crowds[0], answers, strict=True):
        check(request, answer)


@pytest.mark.parametrize("kind", PACKED_KINDS)
@pytest.mark.parametrize("case", ["gpt2", "granitemoe"])
def test_adapters_are_traced_and_weights_counted(kind: str, case: str, tmp_path: Path) -> None:
    directories = plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    write_model(plain, CASES[case]())
    write_quantized(plain, quantized, PACKED_KINDS[kind])
    expected, actual = (
        skeleton.build_skeleton(directory, read_config(directory), torch.float32).parts
        for directory in directories
    )
    assert actual.cuts == expected.cuts
    for path, cut in expected.cuts.items():
        trace = expected.weights.trace(path, cut.shape)
        assert actual.weights.trace(path, cut.shape) == trace
    format = find_format(read_config(quantized), quantized)
    # gemv needs no padding here, and GPTQ's vectors of groups are not weights.
    assert count_elements(quantized, format) == count_elements(plain)


def test_biases_of_zeros_are_no_part_of_the_model(tmp_path: Path) -> None:
    """AutoGPTQ wrote a bias for every module."""
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    write_model(plain, CASES["llama_grouped_queries"]())
    write_quantized(plain, quantized, PACKED_KINDS["gptq"])
    file, config = quantized / "model.safetensors", read_config(quantized)
    tensors, name = load_file(file), "model.layers.1.mlp.up_proj"
    save_file({**tensors, f"{name}.bias": torch.zeros(48)}, file)
    registry.load(quantized, config, ALONE, torch.float32)
    for bias in (f"{name}.bias", "model.norm.bias"):
        save_file({**tensors, bias: torch.ones(48) if bias.startswith(name) else torch.zeros(32)}, file)
        with pytest.raises(WeightsError, match=rf"the first of which is {re.escape(bias)}\."):
            registry.load(quantized, config, ALONE, torch.float32)


def test_families_of_the_models_page() -> None:
    modules = {registry.FAMILIES[CASES[case]().model_type] for case in FAMILIES}
    assert {module.__name__.rpartition(".")[2] for module in modules} == set(models_page.EACH_FORMAT)
    everywhere = {registry.FAMILIES[make().model_type] for make in CASES.values()}
    assert everywhere == set(registry.MODULES), "test_formats serves a format with each of these"
