"""Every family with the GPU's kernels and attention, by their twins on the CPU, against transformers. A step
does not wait for values of the device, so it can be captured in a CUDA graph."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.cuda.interpreter import interpreted
from tests.support.cuda.no_values import NoValues, ValueReadError
from tests.support.cuda.platforms import make_platform
from tests.support.greedy import generate
from tests.support.shard import other_device
from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.family_cases.all import CASES, family_of, runs_on_gpus
from tests.support.shard.family_oracle import NEW_TOKENS, Oracle, check, draw_inputs, load_model
from tests.support.shard.messages import GREEDY
from tgis.shard.collectives import CPU, ProcessGroup
from tgis.shard.kernels.cuda.implementations import KERNELS, Implementations
from tgis.shard.kernels.cuda.ops import CudaKernels
from tgis.shard.startup.load import load

# Interpreted GPU kernels take long: make test-all runs every family.
pytestmark = pytest.mark.slow

DETAILS = {"logprobs": True, "ranks": True}


def plan() -> Iterator[object]:
    """Return all cases; `make test` runs the first of each family."""
    for _, cases in groupby(filter(runs_on_gpus, CASES), family_of):
        for i, case in enumerate(cases):
            yield pytest.param(case, marks=[pytest.mark.slow] if i else [])


def ask(input_ids: list[int], start_token_id: int | None) -> Request:
    is_encoder_decoder = start_token_id is not None
    prompt, encoder = ([start_token_id], input_ids) if is_encoder_decoder else (input_ids, [])
    return Request(prompt, NEW_TOKENS, sampling=GREEDY, details=DETAILS, encoder_token_ids=encoder)


def serve(
    directory: Path,
    kernels: Implementations,
    requests: list[Request],
    dtype: str,
    is_captured: bool = False,
    device: torch.device = CPU,
) -> None:
    """Serve requests. The warm-up uses the twins, which are faster than the interpreter."""
    served = [Implementations.plain()]
    current = {name: partial(_launch, served, name) for name in KERNELS}
    sizes = {"kv_cache_tokens": 2048, "block_size": 4, "max_step_tokens": 64}
    config = configure(directory, dtype=dtype, **sizes)
    group = ProcessGroup(0, 1, device=device)
    runner: Any = load(config, group, make_platform(Implementations(**current), device))
    served[0] = kernels
    if is_captured:
        for name in ("forward", "logits"):
            setattr(runner.model, name, _guard(getattr(runner.model, name)))
    Router(runner, 1).run(list(requests))


def _launch(served: list[Implementations], name: str, *args: Any) -> Any:
    return getattr(served[0], name)(*args)


def _guard(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Any) -> Tensor:
        with NoValues():
            return compute(*args)

    return run


@pytest.mark.parametrize("case", list(plan()))
def test_equals_transformers(case: str, tmp_path: Path) -> None:
    config = CASES[case]()
    write_model(tmp_path, config)
    oracle = Oracle(tmp_path, config)
    answers = [oracle.answer(ids) for ids in draw_inputs()]
    start = oracle.start_token_id if oracle.is_encoder_decoder else None
    requests = [ask(answer.input_ids, start) for answer in answers]
    serve(tmp_path, Implementations.plain(), requests, "float32", is_captured=True)
    for request, answer in zip(requests, answers, strict=True):
        check(request, answer)


def test_experts_one_by_one_cannot_be_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above could not fail."""
    monkeypatch.setattr(CudaKernels, "join_experts", lambda *_: None)
    write_model(tmp_path, CASES["mixtral"]())
    with pytest.raises(ValueReadError):
        serve(tmp_path, Implementations.plain(), [ask([5, 6, 7], None)], "float32", is_captured=True)


# Maximum difference of logprobs from those of the same weights in float32, whose activations are not
# rounded.
BOUNDS = {"bfloat16": 0.1, "float16": 0.004}
ROUNDED = {
    "llama_grouped_queries": "bfloat16",
    "gemma2": "bfloat16",
    "falcon_40b": "float16",
    "bloom": "bfloat16",
    "opt_350m": "float16",
    "olmo2": "bfloat16",
    "granite": "bfloat16",
    "mixtral": "bfloat16",
    "t5": "float16",
    "bart": "bfloat16",
}


def check_rounded(request: Request, token_ids: list[int], logprobs: Tensor, bound: float) -> int:
    """Check tokens up to the first different one, with logprobs [num_tokens, vocab_size]. Return the number
    of checked tokens."""
    for i, (token, actual, expected) in enumerate(
        zip(request.generated, request.logprobs, token_ids, strict=True)
    ):
        assert actual == pytest.approx(float(logprobs[i, token]), abs=bound)
        if token != expected:
            assert logprobs[i, expected] - logprobs[i, token] < 2 * bound
            return i + 1
    return len(token_ids)


def write_rounded(directory: Path, config: Any, dtype: torch.dtype) -> None:
    write_model(directory, config)
    for path in directory.glob("*.safetensors"):
        rounded = {name: tensor.to(dtype).float() for name, tensor in load_file(path).items()}
        save_file(rounded, path, metadata={"format": "pt"})


@pytest.mark.parametrize(("case", "dtype"), ROUNDED.items(), ids=ROUNDED)
def test_activations_of_16_bits(case: str, dtype: str, tmp_path: Path) -> None:
    config = CASES[case]()
    write_rounded(tmp_path, config, getattr(torch, dtype))
    model = load_model(tmp_path, config)
    start = model.generation_config.decoder_start_token_id if config.is_encoder_decoder else None
    requests = [ask(ids, start) for ids in draw_inputs()]
    serve(tmp_path, Implementations.plain(), requests, dtype)
    num_checked = 0
    for request, ids in zip(requests, draw_inputs(), strict=True):
        answer = generate(model, ids, max_new_tokens=NEW_TOKENS)
        num_checked += check_rounded(request, *answer, BOUNDS[dtype])
    assert num_checked > NEW_TOKENS


SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in ("mixtral", "bloom", "gemma2", "olmo2")]


@pytest.mark.parametrize("case", ["phi3_short_and_long", "t5", *SLOW])
def test_nothing_is_left_on_the_cpu(case: str, tmp_path: Path) -> None:
    """A whole model on a separate device gives the same bits."""
    config = CASES[case]()
    write_model(tmp_path, config)
    start = 0 if config.is_encoder_decoder else None
    expected, actual = ([ask(ids, start) for ids in draw_inputs()] for _ in range(2))
    serve(tmp_path, Implementations.plain(), expected, "bfloat16")
    with other_device.present() as device:
        serve(tmp_path, Implementations.plain(), actual, "bfloat16", device=device)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.generated == theirs.generated
        assert mine.logprobs == theirs.logprobs


# The device's runner computes a Llama with kernels in the interpreter.
NOT_QUICK = [pytest.param(case, marks=pytest.mark.slow) for case in ("llama_grouped_queries", "gemma2")]


@pytest.mark.parametrize("case", ["t5", *NOT_QUICK])
def test_kernels_in_the_interpreter(case: str, tmp_path: Path) -> None:
    config = CASES[case]()
    write_model(tmp_path, config)
    oracle = Oracle(tmp_path, config)
    answers = [oracle.answer(ids) for ids in draw_inputs()[1:2]]
    start = oracle.start_token_id if oracle.is_encoder_decoder else None
    requests = [ask(answer.input_ids, start) for answer in answers]
    for request in requests:
        request.max_new_tokens = 2
    serve(tmp_path, interpreted(), requests, "float32", True)
    for request, answer in zip(requests, answers, strict=True):
        assert request.generated == answer.token_ids[:2]
        assert request.logprobs == pytest.approx(answer.logprobs[:2], rel=1e-4, abs=1e-4)
