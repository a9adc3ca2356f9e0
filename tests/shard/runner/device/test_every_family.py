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
    detailed, bare = (
        [ask(start, answer, details) for answer in answers] for details in ({"logprobs": True}, {})
    )
    paths = set[int]()
    for requests in (detailed, bare, bare + detailed):
        ...
