"""Check every model family on a late device, with the kernels' CPU twins, against transformers.

The device samples rows without details, the host rows with details."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.cuda.capturing_device import CapturingDevice
from tests.support.cuda.interpreter import interpreted
from tests.support.cuda.late_device import LateDevice
from tests.support.cuda.late_platform import late_platform
from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.family_cases.all import CASES, runs_on_gpus
from tests.support.shard.family_oracle import NEW_TOKENS, Answer, Oracle, check, draw_inputs
from tgis.pb import shard_pb2 as pb
from tgis.shard.kernels.cuda.implementations import KERNELS, Implementations
from tgis.shard.startup.load import load

# Interpreted GPU kernels take long: make test-all runs every family.
pytestmark = pytest.mark.slow

# Models with windows and soft caps, experts, two rotary tables, or an encoder; test_model_runner has a plain
# one.
QUICK = {"gemma2", "granitemoe", "phi3_short_and_long", "t5"}


def plan() -> Iterator[object]:
    for case in filter(runs_on_gpus, CASES):
        yield pytest.param(case, marks=[] if case in QUICK else [pytest.mark.slow])


def test_quick_cases_are_cases() -> None:
    assert CASES.keys() >= QUICK


@pytest.mark.parametrize("case", list(plan()))
def test_equals_transformers(case: str, tmp_path: Path) -> None:
    config, device = CASES[case](), CapturingDevice()
    write_model(tmp_path, config)
    oracle = Oracle(tmp_path, config)
    start = [oracle.start_token_id] if oracle.is_encoder_decoder else []
    answers = [oracle.answer(ids) for ids in draw_inputs()]
    small = {
        "dtype": "float32",
        "kv_cache_tokens": 2048,
        "block_size": 4,
        "max_step_tokens": 64,
        "cuda_graphs": "3,8",
    }
    runner = load(configure(tmp_path, **small), on=late_platform(device))
    runner.reset()
    bare, detailed = ([ask(answer, start, wanted) for answer in answers] for wanted in (False, True))
    router = Router(runner, seed=1, depth=3)
    router.run(list(bare))
    paths = {response.path for response in router.responses}
    assert pb.STEP_PATH_GRAPH in paths
    assert pb.STEP_PATH_MODEL not in paths
    assert device.max_queued > 3
    runner.reset()
    mixed = [ask(answer, start, wants_details=False) for answer in answers]
    Router(runner, seed=2).run([*detailed, *mixed])
    for request, answer in zip([*bare, *mixed, *detailed], answers * 3, strict=True):
        if request.details:
            check(request, answer)
        assert answer.certain
        assert request.generated[: answer.certain] == answer.token_ids[: answer.certain]


INTERPRETED = [
    "llama_tied",
    *(pytest.param(case, marks=pytest.mark.slow) for case in ("gemma2", "t5", "mixtral")),
]


@pytest.mark.parametrize("case", INTERPRETED)
def test_kernels_in_the_interpreter(case: str, tmp_path: Path) -> None:
    """Return the runner with all kernels as they run on a GPU; steps hold prompts or single tokens."""
    config = CASES[case]()
    write_model(tmp_path, config)
    oracle = Oracle(tmp_path, config)
    start = [oracle.start_token_id] if oracle.is_encoder_decoder else []
    answers = [oracle.answer(ids) for ids in draw_inputs()[:2]]
    served = [Implementations.plain()]  # for loading
    kernels = Implementations(**{name: partial(_launch, served, name) for name in KERNELS})
    sizes = {"dtype": "float32", "kv_cache_tokens": 512, "block_size": 16, "max_step_tokens": 64}
    on = late_platform(LateDevice(), kernels)
    runner = load(configure(tmp_path, **sizes, cuda_graphs="2"), on=on)
    served[0] = interpreted()
    runner.reset()
    requests = [ask(answer, start, wants_details=False) for answer in answers]
    for request in requests:
        request.max_new_tokens = 4
    Router(runner, seed=3, whole=True).run(list(requests))
    for request, answer in zip(requests, answers, strict=True):
        certain = min(answer.certain, 4)
        assert request.generated[:certain] == answer.token_ids[:certain]


def _launch(served: list[Implementations], name: str, *args: Any) -> Any:
    return getattr(served[0], name)(*args)


def ask(answer: Answer, start: list[int], wants_details: bool) -> Request:
    return Request(
        start or answer.input_ids,
        NEW_TOKENS,
        details={"logprobs": True} if wants_details else {},
        encoder_token_ids=answer.input_ids if start else [],
    )
