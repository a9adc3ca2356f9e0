"""Every architecture of GGUF files, with codes of several types, on one rank and two, against transformers
with the dequantized weights. `make test` runs most cases once, every eighth one on two ranks."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from tests.support.shard.checkpoints import write_llama, write_model
from tests.support.shard.driver import Request
from tests.support.shard.family_oracle import NEW_TOKENS, Oracle, check, draw_inputs
from tests.support.shard.gguf_cases import CASES
from tests.support.shard.gguf_writer import write_gguf
from tests.support.shard.messages import GREEDY
from tests.support.shard.ranks import Ranks
from tests.support.shard.relay import serve
from tgis.convert.gguf.architectures import ARCHITECTURES
from tgis.convert.gguf.model_directory import write_model_directory
from tgis.shard.checkpoint.gguf.codes import CODINGS
from tgis.shard.kernels.cpu.ops import CpuKernels

DETAILS = {"logprobs": True, "ranks": True}
# Cases whose parts other cases have, so that only `make test-all` runs them.
PLAIN = ("mamba2", "ministral3", "nemotron_h_moe")


def plan() -> Iterator[object]:
    for (number, case), size in itertools.product(enumerate(CASES), (1, 2)):
        is_quick = size == (2 if number % 8 == 3 else 1) and case not in PLAIN
        marks = [] if is_quick else [pytest.mark.slow]
        yield pytest.param(case, size, id=f"{case}, {size} ranks", marks=marks)


def test_every_architecture_has_a_case() -> None:
    assert {architecture for architecture, _ in CASES.values()} == {*ARCHITECTURES, "t5"}


@pytest.mark.parametrize(("case", "size"), list(plan()))
def test_equals_transformers(case: str, size: int, ranks: Ranks, tmp_path: Path) -> None:
    architecture, make_config = CASES[case]
    config, written, made = make_config(), tmp_path / "written", tmp_path / "made"
    write_model(written, config)
    # Falcon H1's weights are multiplied, which codes cannot be.
    plain = Type.F32 if architecture == "falcon-h1" else None
    write_gguf(written, tmp_path / "model.gguf", architecture, plain)
    oracle = Oracle(written, config)
    made.mkdir()
    write_model_directory([tmp_path / "model.gguf"], made)
    answers = [oracle.answer(ids) for ids in draw_inputs()]
    requests = [ask(oracle, answer.input_ids) for answer in answers]
    [([served], digests), *others] = ranks.run(size, serve, made, 1, [requests], 16)
    assert all(theirs == digests for _, theirs in others)
    for request, answer in zip(served, answers, strict=True):
        check(request, answer)


# Types of the matrices of two layers. Matrices that are stacked have different types.
KINDS = {
    "model.embed_tokens": Type.Q6_K,
    "model.layers.0.self_attn.q_proj": Type.Q4_K,
    "model.layers.0.self_attn.k_proj": Type.Q5_K,
    "model.layers.0.self_attn.v_proj": Type.Q6_K,
    "model.layers.0.self_attn.o_proj": Type.Q5_0,
    "model.layers.0.mlp.gate_proj": Type.Q4_0,
    "model.layers.0.mlp.up_proj": Type.Q4_1,
    "model.layers.0.mlp.down_proj": Type.Q4_K,
    "model.layers.1.self_attn.q_proj": Type.IQ4_NL,
    "model.layers.1.self_attn.k_proj": Type.IQ4_XS,
    "model.layers.1.self_attn.v_proj": Type.MXFP4,
    "model.layers.1.self_attn.o_proj": Type.Q3_K,
    "model.layers.1.mlp.gate_proj": Type.Q5_1,
    "model.layers.1.mlp.up_proj": Type.Q8_0,
    "model.layers.1.mlp.down_proj": Type.Q2_K,
}


@pytest.mark.parametrize("size", [1, 2])
def test_every_type_with_products(
    size: int, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No product uses floats. On two ranks, columns are split inside blocks."""
    assert {kind.name for kind in KINDS.values()} == {*CODINGS}
    made = tmp_path / "made"
    config = write_llama(
        tmp_path,
        hidden_size=512,
        intermediate_size=768,
        num_hidden_layers=2,
        tie_word_embeddings=True,
        vocab_size=99,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
    )
    kinds = {f"{module}.weight": kind for module, kind in KINDS.items()}
    write_gguf(tmp_path, tmp_path / "model.gguf", "llama", kinds=kinds)
    made.mkdir()
    write_model_directory([tmp_path / "model.gguf"], made)
    answers = [Oracle(tmp_path, config).answer(ids) for ids in draw_inputs()]
    requests = [Request(answer.input_ids, NEW_TOKENS, sampling=GREEDY, details=DETAILS) for answer in answers]
    monkeypatch.setattr(CpuKernels, "pack", None)
    [([served], digests), *others] = ranks.run(size, serve, made, 1, [requests], 16)
    assert all(theirs == digests for _, theirs in others)
    for request, answer in zip(served, answers, strict=True):
        check(request, answer)


def ask(oracle: Oracle, input_ids: list[int]) -> Request:
    is_whole = oracle.is_encoder_decoder
    prompt, encoder = ([oracle.start_token_id], input_ids) if is_whole else (input_ids, [])
    return Request(prompt, NEW_TOKENS, sampling=GREEDY, details=DETAILS, encoder_token_ids=encoder)
