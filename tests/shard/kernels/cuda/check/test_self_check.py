"""The self-check at startup detects kernels that fail in any way, and replaces only these."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cuda.interpreter import interpreted
from tests.support.shard import other_device
from tests.support.shard.family_cases.all import CASES
from tgis.shard.collectives import CPU
from tgis.shard.kernels.cuda.check import self_check
from tgis.shard.kernels.cuda.check.inputs import INPUTS, SMALL, ExpertSizes, KernelSizes
from tgis.shard.kernels.cuda.check.self_check import TOLERANCES, check, choose_implementations
from tgis.shard.kernels.cuda.codes.packed import PackedCodes
from tgis.shard.kernels.cuda.functions import dependent_launch
from tgis.shard.kernels.cuda.implementations import KERNELS, Implementations
from tgis.shard.kernels.cuda.states.chunks import StateMemory
from tgis.shard.kernels.cuda.step_state import DeviceDetails
from tgis.shard.memory.state_cache import StateSizes
from tgis.shard.models.registry import make_spec
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.speculators.registry import DraftShape
from tgis.shard.startup.platforms.cuda import configure_products, find_draft_sizes, find_sizes

TWINS = Implementations.plain()
HALVES = (torch.float16, torch.bfloat16)
ONE = HALVES[:1]
# Each kernel is broken in one check and intact in the other.
HALVES_OF_KERNELS = [tuple(KERNELS)[::2], tuple(KERNELS)[1::2]]


def test_kernels_pass() -> None:
    assert check(CPU, [torch.bfloat16], interpreted()) == {}


def test_twins_pass() -> None:
    assert INPUTS.keys() == KERNELS.keys()
    assert check(CPU, tuple(TOLERANCES), TWINS) == {}


def test_inputs_are_on_the_device() -> None:
    with other_device.present() as device:
        assert check(device, ONE, TWINS) == {}


def raises(*_: Any) -> None:
    raise RuntimeError("error: too many registers\nand some advice")


def returns_nothing(*_: Any) -> None:
    pass


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return the twin of a kernel with its first result changed."""
    results = next(iter(INPUTS[name](CPU, torch.float32))).results

    def compute(*args: Any) -> Any:
        returned = KERNELS[name].plain(*args)
        if isinstance(returned, tuple):
            return type(returned)(*returned[:-1], change(returned[-1]))
        if returned is not None:
            return change(returned)
        written = args[results[-1]]
        if isinstance(written, StateMemory):
            written = written.pending
        if isinstance(written, DeviceDetails):
            written = written.words
        tensor = written if isinstance(written, Tensor) else written.seq_lens
        tensor.copy_(change(tensor))
        return None

    return compute


def spoil_last(x: Tensor) -> Tensor:
    y = x.clone()
    y.view(-1)[-1] += 1
    return y


def make_nan(x: Tensor) -> Tensor:
    y = x.clone()
    y.view(-1)[0] = torch.nan
    return y


@pytest.mark.parametrize("broken", HALVES_OF_KERNELS)
def test_kernels_that_do_not_compile_are_named(broken: Sequence[str]) -> None:
    actual = check(CPU, ONE, replace(TWINS, **dict.fromkeys(broken, raises)))
    reason = "it does not run, with weights of torch.float16: RuntimeError: error: too many registers"
    assert actual == dict.fromkeys(broken, reason)


@pytest.mark.parametrize("broken", HALVES_OF_KERNELS)
def test_kernels_with_one_wrong_number_are_named(broken: Sequence[str]) -> None:
    actual = check(CPU, ONE, replace(TWINS, **{name: changed(name, spoil_last) for name in broken}))
    assert actual.keys() == {*broken}
    assert all("differ" in reason for reason in actual.values())


def test_kernels_that_return_nan_are_named() -> None:
    broken = "norm", "turn_and_keep", "attend_segments", "attend_tiles", "gate"
    actual = check(CPU, ONE, replace(TWINS, **{name: changed(name, make_nan) for name in broken}))
    reason = "it differs by nan, more than 0.01, with weights of torch.float16"
    assert actual == dict.fromkeys(broken, reason)


def test_kernels_that_write_nothing_are_named() -> None:
    broken = "begin_step", "attend_tiles", "sample", "describe"
    actual = check(CPU, ONE, replace(TWINS, **dict.fromkeys(broken, returns_nothing)))
    assert actual.keys() == {*broken}


def test_a_kernel_that_fails_for_one_type_is_named() -> None:
    def compute(x: Tensor, *rest: Any) -> Tensor:
        return KERNELS["gate"].plain(x, *rest) * (0.5 if x.dtype == torch.bfloat16 else 1)

    actual = check(CPU, HALVES, replace(TWINS, gate=compute))
    assert actual["gate"].endswith("with weights of torch.bfloat16")
    assert not check(CPU, [torch.float16], replace(TWINS, gate=compute))


def test_results_of_another_type_or_shape_are_named() -> None:
    for change in (Tensor.double, lambda x: x[1:]):
        actual = check(CPU, ONE, replace(TWINS, norm=changed("norm", change)))
        assert actual == {"norm": "its results have wrong shapes or types, with weights of torch.float16"}


def test_twins_replace_kernels_that_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = replace(TWINS, gate=raises, sample=returns_nothing)
    for name, module in KERNELS.items():
        # A kernel and its twin are different functions.
        kernel = getattr(kernels, name)
        monkeypatch.setattr(module, "launch", lambda *args, kernel=kernel: kernel(*args))
    with caplog.at_level(logging.WARNING):
        chosen = choose_implementations(CPU)
    assert chosen.replaced == ["gate", "sample"]
    assert chosen.gate is KERNELS["gate"].plain
    assert chosen.norm is KERNELS["norm"].launch
    assert [message.split(" is replaced")[0] for message in caplog.messages] == [
        "GPU kernel gate",
        "GPU kernel sample",
    ]


def test_a_lost_device_is_not_a_kernel_s_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lose(_: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(self_check, "_synchronise", lose)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        check(CPU, ONE, replace(TWINS, gate=raises))
    assert caplog.messages == ["the GPU failed in kernel gate, or in its twin in torch operators"]


WIDE = KernelSizes(
    num_heads=6,
    num_kv_heads=3,
    head_dim=96,
    hidden_size=288,
    ffn_size=400,
    vocab_size=700,
    states=StateSizes(2, 80, 1, 33, 4),
    experts=ExpertSizes(96, 56),
    codes=SMALL.codes,
    cache_types=SMALL.cache_types,
)


def test_a_kernel_that_fails_at_the_model_s_sizes_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compute(x: Tensor, *rest: Any) -> Tensor:
        if x.shape[1] == WIDE.hidden_size:
            raise RuntimeError("out of resource: shared memory")
        actual: Tensor = KERNELS["norm"].plain(x, *rest)
        return actual

    for module in KERNELS.values():
        monkeypatch.setattr(module, "launch", lambda *args, module=module: module.plain(*args))
    monkeypatch.setattr(KERNELS["norm"], "launch", compute)
    assert choose_implementations(CPU, ONE).replaced == []
    assert choose_implementations(CPU, ONE, WIDE).replaced == ["norm"]
    assert "with weights of torch.float16 and the model's sizes" in caplog.text


def test_kernels_are_launched_normally_if_early_starts_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver that refuses early starts costs no kernel. Here, a CPU takes part in them."""
    starts: list[bool] = []

    def compute(*rest: Any) -> Tensor:
        starts.append(dependent_launch.is_dependent(CPU))
        if starts[-1]:
            raise RuntimeError("Triton Error [CUDA]: operation not supported")
        actual: Tensor = KERNELS["gate"].plain(*rest)
        return actual

    def starts_early(_: torch.device) -> bool:
        return dependent_launch._EarlyStartRefusal.reason is None

    for module in KERNELS.values():
        monkeypatch.setattr(module, "launch", lambda *args, module=module: module.plain(*args))
    monkeypatch.setattr(KERNELS["gate"], "launch", compute)
    monkeypatch.setattr(dependent_launch, "is_dependent", starts_early)
    try:
        assert choose_implementations(CPU, ONE).replaced == []
        assert not starts_early(CPU)
    finally:
        dependent_launch.refuse(None)
    assert starts[0]
    assert not starts[-1]
    assert len(caplog.messages) == 1
    assert "kernels start only when those before them have ended: gate fails its check: " in caplog.text


INNER = KernelSizes(2, 1, 8, 32, 24, 99)  # a small model


def test_a_kernel_that_fails_at_the_speculator_s_sizes_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Check kernels of a speculator with layers, and of one without."""
    layers = replace(make_spec(CASES["llama_grouped_queries"]().to_dict()), head_dim=WIDE.head_dim)
    assert isinstance(layers, DecoderSpec)

    def fail(name: str, is_its: Callable[[Tensor], bool]) -> Callable[..., Any]:
        def compute(x: Tensor, *rest: Any) -> Any:
            if is_its(x):
                raise RuntimeError("out of resource: shared memory")
            return KERNELS[name].plain(x, *rest)

        return compute

    for module in KERNELS.values():
        monkeypatch.setattr(module, "launch", lambda *args, module=module: module.plain(*args))
    cases: dict[str, tuple[DraftShape, Callable[[Tensor], bool]]] = {
        "attend_segments": (DraftShape(layers, 32, None), lambda q: q.shape[2] == WIDE.head_dim),
        "norm": (DraftShape(None, 288, None), lambda x: x.shape[1] == 288),
        "gate": (DraftShape(None, 288, None), lambda x: x.shape[1] == 288),
    }
    for name, (draft, is_its) in cases.items():
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(KERNELS[name], "launch", fail(name, is_its))
            if name == "attend_segments":
                assert choose_implementations(CPU, ONE, INNER).replaced == []
            assert choose_implementations(CPU, ONE, INNER, find_draft_sizes(draft, INNER)).replaced == [name]
        assert "with weights of torch.float16 and the speculator's sizes: " in caplog.text


SIZELESS = "begin_step", "accept_drafts", "widen_codes", "group_rows", "add_low_rank"


def list_tensors(args: tuple[Any, ...]) -> list[Tensor]:
    return [x.codes if isinstance(x, PackedCodes) else x for x in args if isinstance(x, Tensor | PackedCodes)]


@pytest.mark.parametrize("name", KERNELS)
def test_inputs_have_the_model_s_sizes(name: str) -> None:
    """All kernels except five are checked at the sizes of the model."""
    small, wide = (list(INPUTS[name](CPU, torch.float16, sizes)) for sizes in (SMALL, WIDE))
    assert len(small) == len(wide)
    given = [[*each.args[0], *each.args] if name == "describe" else each.args for each in (small[0], wide[0])]
    shapes = [[x.shape for x in list_tensors(tuple(args))] for args in given]
    assert name in SIZELESS or shapes[0][0] != shapes[1][0]


def test_twins_pass_at_the_model_s_sizes() -> None:
    assert check(CPU, ONE, TWINS, [WIDE]) == {}


INTERPRETED_SIZES = [
    KernelSizes(4, 4, 12, 32, 48, 99, StateSizes(2, 8, 2, 5, 2)),
    pytest.param(KernelSizes(4, 2, 128, 512, 512, 3000), marks=pytest.mark.slow),
    pytest.param(KernelSizes(6, 1, 20, 32, 48, 403), marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", INTERPRETED_SIZES)
def test_kernels_pass_at_other_sizes(sizes: KernelSizes) -> None:
    assert check(CPU, [torch.bfloat16], interpreted(), [sizes]) == {}


@pytest.mark.parametrize(
    ("case", "num_ranks", "sizes"),
    [
        ("t5", 1, KernelSizes(4, 4, 12, 32, 48, 99)),
        ("llama_grouped_queries", 2, KernelSizes(2, 1, 8, 32, 24, 99)),
        ("llama_shared_kv_head", 4, KernelSizes(1, 1, 8, 32, 12, 99)),
    ],
)
def test_sizes_of_a_model(case: str, num_ranks: int, sizes: KernelSizes) -> None:
    spec = make_spec(CASES[case]().to_dict())
    assert find_sizes(spec, num_ranks) == sizes


def test_products_keep_partial_sums_in_float32() -> None:
    settings = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    for name in names:
        setattr(settings, name, True)
    try:
        configure_products()
        assert not any(getattr(settings, name) for name in names)
    finally:
        for name in names:
            setattr(settings, name, True)
