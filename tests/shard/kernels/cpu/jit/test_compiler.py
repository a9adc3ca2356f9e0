"""Compiled kernels: threads, units of work and arguments."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray

from tgis.shard.kernels.cpu.jit import compiler
from tgis.shard.kernels.cpu.jit.compiler import Kernel, as_bits, as_float, next_unit, pointer
from tgis.shard.kernels.cpu.jit.scalar_math import exp, softplus, tanh

_F32, _I64 = np.float32(0), np.int64(0)


def _count(args: Any) -> None:
    a = carray(args, 4)
    counts = carray(pointer(a[2], _I64), (a[1],))
    unit = next_unit(args)
    while unit < a[1]:
        counts[unit] += a[3]
        unit = next_unit(args)


def _apply(args: Any) -> None:
    a = carray(args, 7)
    x = carray(pointer(a[2], _F32), (a[1],))
    exps, tanhs = carray(pointer(a[3], _F32), (a[1],)), carray(pointer(a[4], _F32), (a[1],))
    softpluses = carray(pointer(a[6], _F32), (a[1],))
    for i in range(a[1]):
        exps[i] = exp(x[i] * as_float(a[5]))
        tanhs[i] = tanh(x[i] * as_float(a[5]))
        softpluses[i] = softplus(x[i] * as_float(a[5]))


count, apply = Kernel(_count), Kernel(_apply)


@pytest.fixture
def many_threads() -> Iterator[None]:
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


def test_every_unit_is_done_once(many_threads: None) -> None:
    assert compiler._parallel is not None
    counts = torch.zeros(5000, dtype=torch.int64)
    for _ in range(3):
        count.parallel(len(counts), counts.data_ptr(), 2)
    count(len(counts), counts.data_ptr(), 1)
    assert counts.unique().tolist() == [7]


def test_numbers() -> None:
    x = torch.cat((torch.linspace(-43, 43, 10001), torch.tensor([0.0, -0.0, 1e-30, 200.0, -200.0, math.nan])))
    exps, tanhs, softpluses = (torch.empty_like(x) for _ in range(3))
    addresses = (x.data_ptr(), exps.data_ptr(), tanhs.data_ptr())
    apply(len(x), *addresses, as_bits(2.0), softpluses.data_ptr())
    expected = (2 * x.double()).clamp(-86, 86).exp()
    torch.testing.assert_close(exps.double(), expected, rtol=2.5e-7, atol=0, equal_nan=True)
    torch.testing.assert_close(tanhs.double(), (2 * x.double()).tanh(), rtol=0, atol=2.5e-7, equal_nan=True)
    expected = (2 * x.double()).clamp(min=-86).exp().log1p()
    expected = torch.where(x > 10, 2 * x.double(), expected)
    torch.testing.assert_close(softpluses.double(), expected, rtol=4e-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -2.25, 1e-20, math.inf, -math.inf, math.nan])
def test_floats_survive_as_bits(value: float) -> None:
    x, exps, tanhs, softpluses = torch.ones(1), torch.empty(1), torch.empty(1), torch.empty(1)
    addresses = (x.data_ptr(), exps.data_ptr(), tanhs.data_ptr())
    apply(1, *addresses, as_bits(value), softpluses.data_ptr())
    torch.testing.assert_close(tanhs, torch.tensor([value]).tanh(), rtol=1e-6, atol=5e-7, equal_nan=True)
