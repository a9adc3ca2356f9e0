"""Quantized checkpoints, served by several families: transformers' greedy answers with the numbers that the
libraries, or packers in their place, make of the same codes."""

from pathlib import Path

import pytest

from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.family_oracle import NEW_TOKENS, Oracle, check, draw_inputs
from tests.support.shard.packed_kinds import PACKED_KINDS
from tests.support.shard.quantized_files import KINDS, write_quantized
from tests.support.shard.ranks import Ranks
from tests.support.shard.relay import serve

FAMILIES = ("llama_grouped_queries", "gpt2", "granitemoe", "mixtral", "falcon_40b", "t5")
ALL_KINDS = KINDS | PACKED_KINDS
# `make test` runs each kind once, and families that stack, transpose, group and take entries of experts.
QUICK = {
    ("fp8, a scale for each matrix", "granitemoe", 2),
    ("fp8, a scale for each row", "t5", 1),
    ("fp8, a scale for each block", "llama_grouped_queries", 2),
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
        for kind in ALL_KINDS
        for case in FAMILIES
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
