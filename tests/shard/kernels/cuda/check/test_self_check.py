"""The check at start finds kernels that fail in any way, and replaces these alone."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cuda.interpreter import interpreted
from tests.support.shard import other_device
from tgis.shard.collectives import CPU
from tgis.shard.kernels.cuda.check import self_check
from tgis.shard.kernels.cuda.check.inputs import INPUTS
from tgis.shard.kernels.cuda.check.self_check import TOLERANCES, check, choose_implementations
from tgis.shard.kernels.cuda.implementations import KERNELS, Implementations

TWINS = Implementations.plain()
HALVES = (torch.float16, torch.bfloat16)
ONE = HALVES[:1]


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


def gives_nothing(*_: Any) -> None:
    pass


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The twin of a kernel, the first of whose results is changed."""
    results = next(iter(INPUTS[name](CPU, torch.float32))).results

    def compute(*args: Any) -> Any:
        returned = KERNELS[name].plain(*args)
        if returned is not None:
            return change(returned)
        written = args[results[-1]]
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


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_that_does_not_compile_is_named(name: str) -> None:
    found = check(CPU, ONE, replace(TWINS, **{name: raises}))
    reason = "it does not run, with weights of torch.float16: RuntimeError: error: too many registers"
    assert found == {name: reason}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_that_gives_one_wrong_number_is_named(name: str) -> None:
    found = check(CPU, ONE, replace(TWINS, **{name: changed(name, spoil_last)}))
    assert found.keys() == {name}
    assert "differ" in found[name]


@pytest.mark.parametrize("name", ["norm", "turn_and_keep", "attend_segments", "attend_tiles", "gate"])
def test_a_kernel_that_gives_no_number_is_named(name: str) -> None:
    found = check(CPU, ONE, replace(TWINS, **{name: changed(name, make_nan)}))
    assert found == {name: "it differs by nan, more than 0.01, with weights of torch.float16"}


@pytest.mark.parametrize("name", ["begin_step", "attend_tiles", "sample"])
def test_a_kernel_that_writes_nothing_is_named(name: str) -> None:
    assert check(CPU, ONE, replace(TWINS, **{name: gives_nothing})).keys() == {name}


def test_a_kernel_that_fails_for_one_type_is_named() -> None:
    def compute(x: Tensor, *rest: Any) -> Tensor:
        return KERNELS["gate"].plain(x, *rest) * (0.5 if x.dtype == torch.bfloat16 else 1)

    found = check(CPU, HALVES, replace(TWINS, gate=compute))
    assert found["gate"].endswith("with weights of torch.bfloat16")
    assert not check(CPU, [torch.float16], replace(TWINS, gate=compute))


def test_results_of_another_type_or_shape_are_named() -> None:
    for change in (Tensor.double, lambda x: x[1:]):
        found = check(CPU, ONE, replace(TWINS, norm=changed("norm", change)))
        assert found == {"norm": "its results have other shapes or types, with weights of torch.float16"}


def test_twins_take_the_place_of_kernels_that_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = replace(TWINS, gate=raises, sample=gives_nothing)
    for name, module in KERNELS.items():
        # A kernel is another function than its twin.
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
    assert caplog.messages == ["the GPU is lost: kernel gate, or its twin in torch operators, broke it"]
