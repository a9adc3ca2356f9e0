"""Activations by the kernel in the interpreter and by its twin, against their definitions in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.cuda.interpreter import interpreted
from tests.support.cuda.poisoned import guard, is_guarded
from tgis.shard.kernels.cuda import gate
from tgis.shard.kernels.portable.ops import ACTIVATIONS
from tgis.shard.layers.activation import CLAMPED_SWIGLU

COMPUTE: dict[str, Callable[..., Tensor]] = {"kernel": interpreted().gate, "twin": gate.plain}
each_way = pytest.mark.parametrize("compute", COMPUTE.values(), ids=COMPUTE)

DEFINITIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0).square(),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
}


def check(actual: Tensor, x: Tensor, name: str, is_gated: bool) -> None:
    wide = x.double()
    expected = DEFINITIONS[name](wide)
    if is_gated:
        one, other = wide.chunk(2, -1)
        expected = DEFINITIONS[name](one) * other
    rounding = 4e-6 if x.dtype == torch.float32 else 1.01 * torch.finfo(x.dtype).eps / 2
    assert actual.dtype == x.dtype
    torch.testing.assert_close(actual.double(), expected, rtol=rounding, atol=4e-6)


def test_every_activation_has_a_definition() -> None:
    assert DEFINITIONS.keys() == ACTIVATIONS.keys()


@each_way
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_activations(name: str, is_gated: bool, compute: Callable[..., Tensor]) -> None:
    """From where they are 0 to where they are the identity."""
    x = torch.linspace(-30, 30, 602).repeat(2, 1 + is_gated)
    x = guard(x + torch.rand(x.shape) * 0.1)
    before = x.clone()
    check(compute(x, name, is_gated), before, name, is_gated)
    assert torch.equal(x, before)
    assert is_guarded(x)


@each_way
def test_clamped_gates(compute: Callable[..., Tensor]) -> None:
    gate, up = torch.linspace(-30, 30, 602).repeat(2, 1), torch.linspace(20, -20, 602).repeat(2, 1)
    clamped = DEFINITIONS["quick_gelu"](gate.double().clamp(max=7))
    expected = clamped * (up.double().clamp(-7, 7) + 1)
    x = torch.cat((gate, up), -1)
    torch.testing.assert_close(compute(x, CLAMPED_SWIGLU, True).double(), expected, rtol=4e-6, atol=4e-6)
    x[0, 0] = x[1, 602] = torch.nan
    is_nan = compute(x, CLAMPED_SWIGLU, True).isnan()
    assert is_nan.nonzero().tolist() == [[0, 0], [1, 0]]


@each_way
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 5, 1024, 1025, 3000])
def test_sizes(size: int, dtype: torch.dtype, compute: Callable[..., Tensor]) -> None:
    x = guard((torch.randn(3, 2 * size) * 3).to(dtype))
    check(compute(x, "silu", True), x, "silu", True)
    check(compute(x, "gelu", False), x, "gelu", False)


@each_way
@pytest.mark.parametrize("name", DEFINITIONS)
def test_nan_and_infinity(name: str, compute: Callable[..., Tensor]) -> None:
    x = torch.tensor([[torch.nan, 1.0, 9000.0, -5000.0]])
    actual = compute(x, name, False)
    assert actual.isnan().tolist() == [[True, False, False, False]]
    assert actual[0, 2:].tolist() == [9000.0 ** (2 if name == "relu2" else 1), 0.0]


@each_way
def test_no_tokens(compute: Callable[..., Tensor]) -> None:
    assert compute(torch.randn(0, 8), "silu", True).shape == (0, 4)
