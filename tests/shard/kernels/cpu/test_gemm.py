"""Products with packed weights: against torch in double precision, against chains of the C library's fused
multiply-adds, and with the same bits in every batch, for any number of threads and alignment."""

import ctypes
import logging
import math
import os
import subprocess
import sys
from array import array
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.support.shard.products import check_not_finite, check_replay
from tgis.shard.checkpoint.tensors import TensorInMemory
from tgis.shard.kernels.cpu.gemm import product as gemm
from tgis.shard.kernels.cpu.gemm.inner_loop import BLOCK, MANY_ROWS, ROWS
from tgis.shard.kernels.cpu.gemm.many_rows import MAX_ROWS
from tgis.shard.kernels.cpu.gemm.panels import PANEL
from tgis.shard.kernels.cpu.ops import CPU_KERNELS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = [(1, 1), (33, 7), (1500, 40), (BLOCK, PANEL), (BLOCK + 1, 3 * PANEL + 1), (2 * BLOCK, 6 * PANEL - 1)]
COUNTS = [*range(1, 3 * ROWS + 2), 61, 127, 128, 241]


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_rows_are_independent(dtype: torch.dtype, in_features: int, out_features: int) -> None:
    weight, x = torch.randn(out_features, in_features), torch.randn(241, in_features)
    product = gemm.pack(TensorInMemory(weight, "a weight"), dtype)
    whole = product(x)
    expected = x.double() @ weight.to(dtype).double().t()
    scale = x.double().abs() @ weight.to(dtype).double().abs().t()
    # A chain of k float32 additions. On average, the error is far below k roundings.
    assert ((whole - expected).abs() <= 2**-24 * in_features**0.5 * 4 * scale).all()
    for count in COUNTS:
        assert torch.equal(product(x[:count]), whole[:count]), f"{count} rows"
        assert torch.equal(product(x[-count:]), whole[-count:]), f"{count} rows"
    assert product(x[:0]).shape == (0, out_features)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_sum_is_one_chain(dtype: torch.dtype) -> None:
    fma = ctypes.CDLL("libm.so.6").fmaf
    fma.argtypes, fma.restype = [ctypes.c_float] * 3, ctypes.c_float
    weight, x = torch.randn(PANEL + 2, 2 * BLOCK + 5), torch.randn(ROWS + 1, 2 * BLOCK + 5)
    y = gemm.pack(TensorInMemory(weight, "a weight"), dtype)(x)
    for row, column in ((0, 0), (1, PANEL), (ROWS, PANEL + 1), (ROWS, PANEL - 1)):
        total = 0.0
        for one, other in zip(x[row].tolist(), weight[column].to(dtype).tolist(), strict=True):
            total = fma(one, other, total)
        assert y[row, column] == total


def add_chains(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T, each element added in the order of x's columns. Each sum is computed in float64 and
    rounded to float32; double rounding almost never changes the result."""
    total = torch.zeros(len(x), len(weight))
    for column, factors in zip(x.double().T, weight.double().T, strict=True):
        total = (total + column.outer(factors)).float()
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_features", [BLOCK, BLOCK + 1])
def test_many_rows_are_chains(dtype: torch.dtype, in_features: int) -> None:
    """Sizes are around each limit of rows, blocks of columns and panels, in one to three groups of rows."""
    weight, x = torch.randn(2 * PANEL + 3, in_features), torch.randn(2 * MAX_ROWS + 1, in_features)
    expected = add_chains(x, weight.to(dtype))
    counts = [*range(MANY_ROWS - 1, MANY_ROWS + ROWS + 2), MAX_ROWS, MAX_ROWS + 1, 2 * MAX_ROWS + 1]
    for out_features in (PANEL - 1, 2 * PANEL, 2 * PANEL + 3):
        product = gemm.pack(TensorInMemory(weight[:out_features], "a weight"), dtype)
        for num_threads, count in [*((1, count) for count in counts), (2, counts[-1])]:
            torch.set_num_threads(num_threads)
            actual = product(x[:count])
            assert torch.equal(actual, expected[:count, :out_features]), (
                f"{count} rows, {num_threads} threads"
            )


def test_two_threads_meet() -> None:
    """The second thread takes units from the back. Whatever the first one took, every unit is taken exactly
    once."""
    weight, x = torch.randn(3 * PANEL + 1, 40), torch.randn(MAX_ROWS + 1, 40)
    product = gemm.pack(TensorInMemory(weight, "a weight"), torch.float32)
    expected, run = product(x), product.kernel._entry

    def find_missing(counter: int) -> Tensor:
        """Return the units that a thread does not take if the counter starts like this."""
        y = torch.full_like(expected, torch.nan)
        sizes = (len(x), len(weight), x.shape[1], 1)
        args = array("q", (counter, *sizes, x.data_ptr(), product.panels.data_ptr(), y.data_ptr()))
        run(args.buffer_info()[0])
        missing = y.isnan()
        assert torch.equal(y[~missing], expected[~missing])
        return missing

    num_units = next(count for count in range(100) if find_missing(count << 28).all())
    assert num_units > 4
    for taken in range(num_units + 1):
        first, last = find_missing(num_units - taken << 28), find_missing(1 << 56 | taken)
        assert torch.equal(first, ~last), f"{taken} of {num_units}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads_or_alignment(dtype: torch.dtype) -> None:
    """Many groups of rows, many units, and x at every offset within a cache line."""
    weight, x = torch.randn(10 * PANEL + 3, 1700), torch.randn(450, 1700)
    product = gemm.pack(TensorInMemory(weight, "a weight"), dtype)
    expected = product(x)
    for num_threads in (2, 3):
        torch.set_num_threads(num_threads)
        for count in (1, 2, 60, 449, 450):
            assert torch.equal(product(x[:count]), expected[:count]), f"{count} rows, {num_threads} threads"
    room = torch.empty(5 * 1700 + 16)
    for offset in range(16):
        moved = room[offset : offset + 5 * 1700].view(5, 1700).copy_(x[:5])
        assert torch.equal(product(moved), expected[:5]), f"{4 * offset} bytes off"
        assert torch.equal(product(moved[:1]), expected[:1]), f"{4 * offset} bytes off"


_MANY_THREADS = """
import torch
from tgis.shard.checkpoint.tensors import TensorInMemory
from tgis.shard.kernels.cpu.gemm import product as packed
torch.set_num_threads(1)
product = packed.pack(TensorInMemory(torch.randn(323, 1700), "a weight"), torch.float32)
x = torch.randn(450, 1700)
expected = product(x)
torch.set_num_threads(4)
assert all(torch.equal(product(x), expected) for _ in range(20))
"""


@pytest.mark.slow
def test_scratch_memory_lives_as_long_as_its_kernel() -> None:
    """With one arena for all threads, memory that is freed too early is reused by another thread at once."""
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
    subprocess.run([sys.executable, "-c", _MANY_THREADS], check=True, env=environment)


def test_a_captured_product_reads_the_current_x() -> None:
    product = gemm.pack(TensorInMemory(torch.randn(70, 40), "a weight"), torch.float16)
    check_replay(product, torch.randn(3, 40))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_every_type_becomes_every_type(
    dtype: torch.dtype, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are packed in pieces, rounded like torch does, from memory with gaps that is released."""
    monkeypatch.setattr(gemm, "_PIECE", 2 * PANEL * 9)
    weight = torch.randn(7 * PANEL + 5, 18).to(stored)[:, ::2]
    product, expected = gemm.pack(TensorInMemory(weight, "a weight"), dtype), weight.to(dtype).float().clone()
    weight.zero_()
    assert torch.equal(product(torch.eye(9)).t(), expected)
    assert (product.in_features, product.out_features) == (9, 7 * PANEL + 5)
    assert product.panels.nbytes == 8 * PANEL * 9 * dtype.itemsize


@pytest.mark.parametrize(
    "weight", [[70000.0, 1.0], [-65521.0, 1.0], [3e-6, -9e-4], [torch.inf, 1.0], [torch.nan, 1.0]]
)
def test_values_outside_float16_stay_exact(weight: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        product = CPU_KERNELS.pack(TensorInMemory(torch.tensor([weight]), "file: tensor x"), torch.float16)
    assert caplog.messages == ["file: tensor x does not fit float16 and is kept as float32"]
    if all(math.isfinite(one) for one in weight):
        assert product(torch.eye(2)).flatten().tolist() == torch.tensor(weight).tolist()


@pytest.mark.parametrize("weight", [torch.zeros(2, 2), torch.full((2, 2), 65504.0), torch.eye(2) * 2**-10])
def test_values_within_float16(weight: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    product = CPU_KERNELS.pack(TensorInMemory(weight, "a weight"), torch.float16)
    assert not caplog.messages
    assert torch.equal(product(torch.eye(2)), weight.t())


def test_bfloat16_keeps_its_range(caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.tensor([[1e30, 1e-30], [-(2.0**-120), 3.0]]).bfloat16()
    product = CPU_KERNELS.pack(TensorInMemory(weight, "a weight"), torch.bfloat16)
    assert not caplog.messages
    assert torch.equal(product(torch.eye(2)), weight.float().t())


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinity_and_nan_stay_in_their_row(dtype: torch.dtype) -> None:
    check_not_finite(gemm.pack(TensorInMemory(torch.randn(40, 20), "a weight"), dtype), torch.randn(9, 20))


def test_weights_are_read_a_few_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether a matrix fits float16 is only known after its last piece."""
    monkeypatch.setattr(gemm, "_PIECE", 3000)
    weight = torch.randn(323, 40)
    weight[:100] *= 1e-6
    product = gemm.pack(TensorInMemory(weight, "file: tensor x"), torch.float16)
    assert torch.equal(product(torch.eye(40)), weight.half().float().t())
    assert not caplog.messages
    for beyond in (70000.0, math.nan):
        weight[250, 7] = beyond
        caplog.clear()
        product = gemm.pack(TensorInMemory(weight, "file: tensor x"), torch.float16)
        assert caplog.messages == ["file: tensor x does not fit float16 and is kept as float32"]
        rows = [row for row in range(323) if row != 250]
        assert torch.equal(product(torch.eye(40))[:, rows], weight.t()[:, rows])
