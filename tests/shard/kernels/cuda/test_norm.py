"""Norms by the kernel in the interpreter and by its twin, against their definition in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.cuda.interpreter import interpreted
from tests.support.cuda.poisoned import guard, is_guarded
from tgis.shard.kernels.cuda import norm

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
COMPUTE: dict[str, Callable[..., Tensor]] = {"kernel": interpreted().norm, "twin": norm.plain}
each_way = pytest.mark.parametrize("compute", COMPUTE.values(), ids=COMPUTE)

EPS = 1e-3
NUM_TOKENS = 3


def define(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, is_centred: bool) -> Tensor:
    x, weight = x.double(), weight.double()
    if is_centred:
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    return y if bias is None else y + bias.double()


def check(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    rounding = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    torch.testing.assert_close(actual.double(), expected, rtol=1.01 * rounding, atol=3e-6)


@each_way
@pytest.mark.parametrize("size", [1, 7, 64, 100, 1024, 4100, 16384])
@pytest.mark.parametrize("is_centred", [False, True])
def test_sizes(size: int, is_centred: bool, compute: Callable[..., Tensor]) -> None:
    """Rows with a mean far from zero, inside memory that must not be accessed."""
    x = guard(torch.randn(NUM_TOKENS, size) + 5)
    delta = guard(torch.randn(NUM_TOKENS, size).bfloat16())
    weight, bias = guard(torch.randn(size)), guard(torch.randn(size)) if is_centred else None
    total = x + delta.float()
    actual = compute(x, delta, weight, bias, EPS, is_centred, torch.float32)
    check(actual, define(total, weight, bias, EPS, is_centred), torch.float32)
    assert torch.equal(x, total), "x is not the sum"
    assert is_guarded(x)
    assert is_guarded(delta)


@each_way
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("delta_dtype", [None, *FLOATS])
def test_types(dtype: torch.dtype, delta_dtype: torch.dtype | None, compute: Callable[..., Tensor]) -> None:
    x, weight = torch.randn(NUM_TOKENS, 48) * 3, torch.randn(48)
    delta = None if delta_dtype is None else torch.randn(NUM_TOKENS, 48).to(delta_dtype)
    total = x.clone() if delta is None else x + delta.float()
    actual = compute(x, delta, weight, None, EPS, False, dtype)
    check(actual, define(total, weight, None, EPS, False), dtype)
    assert torch.equal(x, total)


@each_way
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("is_centred", [True, False])
def test_a_branch_s_output_is_normalised(
    dtype: torch.dtype, has_bias: bool, is_centred: bool, compute: Callable[..., Tensor]
) -> None:
    """x may have another type than float32. An RMS norm has no bias."""
    x, weight = torch.randn(NUM_TOKENS, 100).to(dtype), torch.randn(100)
    bias = torch.randn(100) if has_bias and is_centred else None
    before = x.clone()
    actual = compute(x, None, weight, bias, EPS, is_centred, torch.float32)
    check(actual, define(before, weight, bias, EPS, is_centred), torch.float32)
    assert torch.equal(x, before)


@each_way
def test_the_sum_is_rounded_to_the_type_of_x(compute: Callable[..., Tensor]) -> None:
    x, delta = torch.randn(NUM_TOKENS, 40).bfloat16(), torch.randn(NUM_TOKENS, 40)
    total = (x.float() + delta).bfloat16()
    actual = compute(x, delta, torch.ones(40), None, EPS, False, torch.float32)
    assert torch.equal(x, total)
    check(actual, define(total, torch.ones(40), None, EPS, False), torch.float32)


@each_way
def test_nan_and_infinity_stay_in_their_row(compute: Callable[..., Tensor]) -> None:
    x = torch.randn(4, 33)
    x[1, 5], x[2, 0] = torch.nan, torch.inf
    actual = compute(x, None, torch.ones(33), None, EPS, True, torch.float32)
    assert actual.isfinite().all(-1).tolist() == [True, False, False, True]


@each_way
def test_no_tokens(compute: Callable[..., Tensor]) -> None:
    actual = compute(torch.randn(0, 8), torch.randn(0, 8), torch.ones(8), None, EPS, False, torch.float16)
    assert actual.shape == (0, 8)
    assert actual.dtype == torch.float16
