"""Models that transformers' code runs, on a late device with the kernels' CPU twins, against transformers."""

from pathlib import Path

import pytest
import torch

from tests.support.cuda.late_device import LateDevice
from tests.support.cuda.late_platform import late_platform
from tests.support.cuda.platforms import make_platform
from tests.support.shard import other_device
from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request, Router, configure, opening
from tests.support.shard.family_oracle import NEW_TOKENS, Oracle, check, draw_inputs
from tests.support.shard.foreign_cases import CASES
from tests.support.shard.messages import SAMPLE, Steps, integers
from tests.support.shard.portable import plain
from tgis.pb import shard_pb2 as pb
from tgis.shard.collectives import CPU, ProcessGroup
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.load import load
from tgis.shard.startup.platforms.interface import Platform

SIZES = {
    "kv_cache_tokens": 2048,
    "block_size": 4,
    "max_step_tokens": 64,
    "max_sequence_length": 64,
    "speculate": 3,
}
EAGER = {pb.STEP_PATH_UNSPECIFIED, pb.STEP_PATH_MODEL, pb.STEP_PATH_PROMPT}
# Maximum difference of log-probabilities that rounded activations cause.
BOUNDS = {"bfloat16": 0.1, "float16": 0.004}


def serve(path: Path, on: Platform, dtype: str = "float32") -> ModelRunner:
    runner = load(configure(path, **SIZES, dtype=dtype, deployment_framework="hf_transformers"), on=on)
    runner.reset()
    return runner


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "cohere2" else [pytest.mark.slow]) for case in CASES]
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


@pytest.mark.slow
def test_sampled_tokens_are_those_of_the_cpu(tmp_path: Path) -> None:
    write_model(tmp_path, CASES["phi"]())
    generated = []
    for on in (plain(CPU), late_platform(LateDevice())):
        requests = [
            Request(ids, 12, sampling={**SAMPLE, "seed": 7 + i}) for i, ids in enumerate(draw_inputs())
        ]
        Router(serve(tmp_path, on), seed=2).run(list(requests))
        generated.append([request.generated for request in requests])
    assert generated[0] == generated[1]


@pytest.mark.slow
def test_drafts(tmp_path: Path) -> None:
    """Accepted drafts are the tokens that would have been sampled."""
    write_model(tmp_path, CASES["phi"]())
    runner = serve(tmp_path, late_platform(LateDevice()))
    [request] = requests = [Request([7, 8, 9], 6)]
    Router(runner, seed=1).run(list(requests))
    first, *drafts = request.generated[:4]
    runner.reset()
    steps = Steps(runner.info.block_size, runner.info.num_blocks)
    opened = [opening(Request([7, 8, 9], 6, row=0))]
    sampled = runner.launch(steps.step([(0, 0, 3)], opened)).answer()
    assert integers(sampled.token_ids) == [first]
    verified = runner.launch(steps.step([(0, 3, 4)], drafts={0: drafts[:2]})).answer()
    assert integers(verified.token_ids) == drafts
    assert verified.path == pb.STEP_PATH_MODEL


def compute(path: Path, device: torch.device, dtype: str) -> list[Request]:
    on = make_platform(Implementations.plain(), device)
    config = configure(path, **SIZES, dtype=dtype, deployment_framework="hf_transformers")
    runner = load(config, ProcessGroup(0, 1, device=device), on)
    requests = [Request(ids, NEW_TOKENS, details={"logprobs": True}) for ids in draw_inputs()]
    Router(runner, 1).run(list(requests))
    return requests


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("phi", "bfloat16"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("biogpt", "float16"), ("cohere2", "float32"))
        ),
    ],
)
def test_nothing_is_left_on_the_cpu(case: str, dtype: str, tmp_path: Path) -> None:
    """A whole model on a separate device gives the same bits."""
    write_model(tmp_path, CASES[case]())
    expected = compute(tmp_path, CPU, dtype)
    with other_device.present() as device:
        actual = compute(tmp_path, device, dtype)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.generated == theirs.generated
        assert mine.logprobs == theirs.logprobs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_16_bits(dtype: str, tmp_path: Path) -> None:
    """The scores are near those of the same weights in float32, and are not rounded to 16 bits themselves."""
    write_model(tmp_path, CASES["phi"]())
    runner = serve(tmp_path, late_platform(LateDevice()), dtype)
    assert (runner.info.weight_dtype, runner.info.cache_dtype) == (dtype, dtype)
    exact = serve(tmp_path, plain(CPU), dtype)
    requests, oracle = (
        [Request(ids, NEW_TOKENS, details={"logprobs": True}) for ids in draw_inputs()] for _ in range(2)
    )
    Router(runner, 1).run(list(requests))
    Router(exact, 1).run(list(oracle))
    logits = runner.model.logits(torch.ones(3, 32, dtype=getattr(torch, dtype)))
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.to(getattr(torch, dtype)).float())
    pairs = list(zip(requests, oracle, strict=True))
    equal = [(one, other) for one, other in pairs if one.generated[0] == other.generated[0]]
    assert len(equal) > 1
    for actual, expected in equal:
        assert actual.logprobs[0] == pytest.approx(expected.logprobs[0], abs=BOUNDS[dtype])
