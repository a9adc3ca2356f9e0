"""Models that transformers' code runs, on a late device with the kernels' CPU twins, against transformers."""

from pathlib import Path

import pytest

from tests.support.cuda.late_device import LateDevice
from tests.support.cuda.late_platform import late_platform
from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.family_oracle import NEW_TOKENS, Oracle, check, draw_inputs
from tests.support.shard.foreign_cases import CASES
from tests.support.shard.messages import SAMPLE
from tests.support.shard.portable import plain
from tgis.pb import shard_pb2 as pb
from tgis.shard.collectives import CPU
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.load import load
from tgis.shard.startup.platform import Platform

SIZES = {
    "kv_cache_tokens": 2048,
    "block_size": 4,
    "max_step_tokens": 64,
    "max_sequence_length": 64,
    "speculate": 3,
}
EAGER = {pb.STEP_PATH_UNSPECIFIED, pb.STEP_PATH_MODEL, pb.STEP_PATH_PROMPT}
# Windows and layers without positions, two head sizes and shared caches, learned positions.
QUICK = ("cohere2", "gemma4_text", "biogpt")


def serve(path: Path, on: Platform, dtype: str = "float32") -> ModelRunner:
    runner = load(configure(path, **SIZES, dtype=dtype, deployment_framework="hf_transformers"), on=on)
    runner.reset()
    return runner


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES]
)
def test_equals_transformers(case: str, tmp_path: Path) -> None:
    config, device = CASES[case](), LateDevice()
    write_model(tmp_path, config)
    oracle = Oracle(tmp_path, config)
    answers = [oracle.answer(ids) for ids in draw_inputs()]
    runner = serve(tmp_path, late_platform(device))
    bare, detailed = (
        [Request(list(answer.input_ids), NEW_TOKENS, details=details) for answer in answers]
        for details in ({}, {"logprobs": True, "ranks": True})
    )
    router = Router(runner, seed=1, depth=3)
    router.run([*bare, *detailed])
    assert {response.path for response in router.responses} == EAGER
    assert device.max_queued > 3
    for request, answer in zip([*bare, *detailed], answers * 2, strict=True):
        if request.details:
            check(request, answer)
        assert answer.certain
        assert request.generated[: answer.certain] == answer.token_ids[: answer.certain]


def test_sampled_tokens_are_those_of_the_cpu(tmp_path: Path) -> None:
    write_model(tmp_path, CASES["phi"]())
    generated = []
    for on in (plain(CPU), late_platform(LateDevice())):
        requests = [Request(ids, 12, sampling={**SAMPLE, "seed": 7 + i}) for i, ids in enumerate(draw_inputs())]
        Router(serve(tmp_path, on), seed=2).run(list(requests))
        generated.append([request.generated for request in requests])
    assert generated[0] == generated[1]
