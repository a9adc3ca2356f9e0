"""Products of few rows and the addition of their parts, by the kernels in the interpreter and by their twins,
against float64."""

from collections.abc import Callable

import pytest
import torch
import triton
from torch import Tensor

from tests.support.cuda.interpreter import interpreted
from tests.support.cuda.poisoned import guard, is_guarded
from tgis.shard.kernels.cuda.few_rows import add_parts, multiply_few
from tgis.shard.kernels.cuda.few_rows.multiply_few import MAX_ROWS, count_parts

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MULTIPLY: dict[str, Callable[..., Tensor]] = {
    "kernel": interpreted().multiply_few,
    "twin": multiply_few.plain,
}
ADD: dict[str, Callable[..., Tensor]] = {"kernel": interpreted().add_parts, "twin": add_parts.plain}
each_product = pytest.mark.parametrize("compute", MULTIPLY.values(), ids=MULTIPLY)
each_sum = pytest.mark.parametrize("compute", ADD.values(), ids=ADD)
each_type = pytest.mark.parametrize("dtype", FLOATS)
# Outputs and columns that fill tiles or not, in one part, two, four and seven. The last may be short.
SIZES = [(70, 136), (64, 64), (1, 5), (130, 520), (70, 1024), (20, 1030), (3, 64 * 33)]
each_size = pytest.mark.parametrize(("num_outputs", "num_columns"), SIZES)


def draw(
    num_rows: int, num_outputs: int, num_columns: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, a weight and a bias, inside memory that must not be accessed."""
    weight = torch.randn(num_outputs, num_columns) / num_columns**0.5
    return (
        guard(torch.randn(num_rows, num_columns).to(dtype)),
        guard(weight.to(dtype)),
        guard(torch.randn(num_outputs).to(dtype)),
    )


def check(actual: Tensor, expected: Tensor, unit: float) -> None:
    bound = unit * float(expected.abs().max())
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)


@each_product
@each_type
@each_size
def test_products(
    num_outputs: int, num_columns: int, dtype: torch.dtype, compute: Callable[..., Tensor]
) -> None:
    x, weight, bias = draw(3, num_outputs, num_columns, dtype)
    expected = x.double() @ weight.double().T
    check(compute(x, weight, None, torch.float32), expected, 2e-6)
    rounded = compute(x, weight, bias, dtype)
    assert rounded.dtype == dtype
    check(rounded, expected + bias.double(), max(2e-6, torch.finfo(dtype).eps))
    assert all(map(is_guarded, (x, weight, bias)))


@each_product
@each_size
def test_parts_are_those_of_the_columns(
    num_outputs: int, num_columns: int, compute: Callable[..., Tensor]
) -> None:
    x, weight, _ = draw(3, num_outputs, num_columns, torch.bfloat16)
    parts = compute(x, weight, None, torch.float32, True)
    assert parts.shape == (count_parts(num_outputs, num_columns), 3, num_outputs)
    width = triton.cdiv(triton.cdiv(num_columns, multiply_few.TILE), len(parts)) * multiply_few.TILE
    for number, part in enumerate(parts):
        columns = slice(number * width, (number + 1) * width)
        check(part, x[:, columns].double() @ weight[:, columns].double().T, 2e-6)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in FLOATS[:2])]
)
@pytest.mark.parametrize(("num_outputs", "num_columns"), [(70, 136), (20, 1030)])
def test_a_row_has_the_same_bits_in_all_numbers_of_rows(
    num_outputs: int, num_columns: int, dtype: torch.dtype
) -> None:
    multiply = MULTIPLY["kernel"]
    x, weight, bias = draw(MAX_ROWS, num_outputs, num_columns, dtype)
    together = multiply(x, weight, bias, torch.float32)
    check(together, x.double() @ weight.double().T + bias.double(), 2e-6)
    for num_rows in (1, 2, 3, 8, 15):
        first = MAX_ROWS - num_rows
        fewer = multiply(x[first:].contiguous(), weight, bias, torch.float32)
        assert torch.equal(fewer, together[first:])


@each_type
def test_the_sum_of_parts_is_the_product(dtype: torch.dtype) -> None:
    """Whoever adds the parts gets the bits of the product."""
    x, weight, bias = draw(5, 70, 1024, dtype)
    (multiply, _), (add, _) = MULTIPLY.values(), ADD.values()
    parts = multiply(x, weight, None, torch.float32, True)
    assert len(parts) == 4
    assert torch.equal(add(parts, bias, dtype), multiply(x, weight, bias, dtype))


def test_a_column_that_is_nan_spoils_its_output_only() -> None:
    for compute in MULTIPLY.values():
        x, weight, _ = draw(2, 70, 136, torch.bfloat16)
        weight[3, 100] = torch.nan
        assert compute(x, weight, None, torch.float32).isnan().nonzero()[:, 1].unique().tolist() == [3]


@each_sum
@each_type
@pytest.mark.parametrize("num_parts", [1, 8])
def test_sums_of_parts(num_parts: int, dtype: torch.dtype, compute: Callable[..., Tensor]) -> None:
    parts, bias = guard(torch.randn(num_parts, 3, 1100)), torch.randn(1100).to(dtype)
    expected = parts.double().sum(0)
    check(compute(parts, None, torch.float32), expected, 1e-6)
    rounded = compute(parts, bias, dtype)
    assert rounded.dtype == dtype
    check(rounded, expected + bias.double(), max(1e-6, torch.finfo(dtype).eps))


@each_sum
def test_parts_are_added_in_order(compute: Callable[..., Tensor]) -> None:
    parts = torch.tensor([1e8, 1.0, -1e8, 1.0]).reshape(4, 1, 1)
    assert compute(parts, None, torch.float32).item() == 1.0


@each_product
def test_no_rows(compute: Callable[..., Tensor]) -> None:
    for num_columns in (136, 1024):
        x, weight, bias = draw(1, 70, num_columns, torch.bfloat16)
        assert compute(x[:0], weight, bias, torch.float32).shape == (0, 70)


def test_parts_depend_on_the_matrix_only() -> None:
    """Those of the 8B, its head, and matrices of few columns."""
    sizes = {(6144, 4096): 4, (4096, 4096): 8, (4096, 14336): 8, (28672, 4096): 1, (128256, 4096): 1}
    sizes |= {(64, 511 - 64): 1, (64, 512): 2, (64, 64 * 15): 2, (64, 64 * 16): 4, (64, 64 * 32): 8}
    sizes |= {(64, 64 * 33): 7}  # of 5 tiles each
    assert {size: count_parts(*size) for size in sizes} == sizes


def test_too_many_rows_are_refused() -> None:
    x, weight, _ = draw(MAX_ROWS + 1, 70, 136, torch.bfloat16)
    with pytest.raises(AssertionError, match="a program computes all rows"):
        MULTIPLY["kernel"](x, weight, None, torch.float32)
