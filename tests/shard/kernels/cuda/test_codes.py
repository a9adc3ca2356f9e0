"""Products with codes by the kernels in the interpreter and by their twins, against float64."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.cuda.interpreter import interpreted
from tests.support.cuda.poisoned import guard, is_guarded
from tests.support.shard import code_cases
from tests.support.shard.code_cases import Case
from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.collectives import CPU
from tgis.shard.kernels.cuda.check.code_inputs import LAYOUTS, DrawnCodes, draw_codes
from tgis.shard.kernels.cuda.codes import multiply_codes, widen_codes
from tgis.shard.kernels.cuda.codes.multiply_codes import MAX_ROWS, STAGES, count_parts
from tgis.shard.kernels.cuda.codes.packed import OUTPUTS, PackedCodes
from tgis.shard.kernels.cuda.codes.packing import can_pack, count_bytes, pack
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.products.codes import CudaCodeProduct, CudaJoinedProduct, pack_product

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
TWINS = Implementations.plain()
MULTIPLY: dict[str, Callable[..., Tensor]] = {
    "kernel": interpreted().multiply_codes,
    "twin": multiply_codes.plain,
}
WIDEN: dict[str, Callable[..., Tensor]] = {"kernel": interpreted().widen_codes, "twin": widen_codes.plain}
each_product = pytest.mark.parametrize("compute", MULTIPLY.values(), ids=MULTIPLY)
each_widening = pytest.mark.parametrize("compute", WIDEN.values(), ids=WIDEN)
SIGNED, UNSIGNED, FLOAT8 = torch.int8, torch.uint8, torch.float8_e4m3fn
GROUPS = {
    f"{bits} bits, groups of {group}": Case(CodeLayout(UNSIGNED, bits, group, has_zeros=True), 300)
    for bits in (4, 8)
    for group in (16, 32, 64, 128, None)
}
CASES = {name: case for name, case in code_cases.CASES.items() if can_pack(case.layout)} | GROUPS


def draw_matrices() -> Iterator[tuple[str, Codes]]:
    """Yield matrices whose rows and columns fill neither panels nor tiles."""
    for name, case in CASES.items():
        yield name, code_cases.draw(case, 70)
    for layout in LAYOUTS:
        yield f"{layout.bits} bits of {layout.dtype}, {layout.group}", draw_codes(layout, 136, 70)


MATRICES = dict(draw_matrices())
QUICK = (
    *("4 bits, zeros", "4 bits, reordered", "3 bits", "a table", "8 bits, zeros", "4 bits of torch.int8, 64"),
    "8 bits of torch.float8_e4m3fn, None",
)
slow = pytest.mark.slow
each_matrix = pytest.mark.parametrize(
    "codes",
    [pytest.param(codes, id=name, marks=() if name in QUICK else slow) for name, codes in MATRICES.items()],
)


def define(codes: Codes) -> Tensor:
    """Return the weights in float64."""
    numbers = codes.values.double() if codes.layout.dtype == FLOAT8 else code_cases.expand(codes)[0]
    group_of = codes.group_of
    if group_of is None:
        group_of = torch.arange(numbers.shape[1]) // (codes.layout.group or numbers.shape[1])
    zeros = 0.0 if codes.zeros is None else codes.zeros[:, group_of].double()
    offsets = 0.0 if codes.offsets is None else codes.offsets[:, group_of].double()
    return (numbers - zeros) * codes.scales[:, group_of].double() + offsets


def packed(codes: Codes) -> PackedCodes:
    return pack(DrawnCodes(codes), CPU)


def check(actual: Tensor, expected: Tensor, unit: float) -> None:
    bound = unit * float(expected.abs().max())
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)


@each_widening
@each_matrix
def test_weights(codes: Codes, compute: Callable[..., Tensor]) -> None:
    expected = define(codes)
    for dtype in FLOATS:
        actual = compute(packed(codes), dtype)
        assert actual.dtype == dtype
        unit = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(actual.double(), expected, rtol=unit, atol=unit)


@each_product
@each_matrix
@pytest.mark.parametrize("dtype", [torch.bfloat16, *(pytest.param(each, marks=slow) for each in FLOATS[:2])])
def test_products(dtype: torch.dtype, codes: Codes, compute: Callable[..., Tensor]) -> None:
    """The numbers of a table may be rounded to the type of x."""
    x, bias = guard(torch.randn(3, codes.values.shape[1]).to(dtype)), torch.randn(70).to(dtype)
    expected = x.double() @ define(codes).T
    weight = packed(codes)
    unit = max(2e-6, torch.finfo(dtype).eps) if codes.layout.table else 2e-6
    check(compute(x, weight, None, torch.float32), expected, unit)
    rounded = compute(x, weight, bias, dtype)
    assert rounded.dtype == dtype
    check(rounded, expected + bias.double(), max(unit, torch.finfo(dtype).eps))
    assert is_guarded(x)


LONG = {
    "parts": draw_codes(CodeLayout(UNSIGNED, 4, 16, has_zeros=True), 512 + 16, 20),
    "offsets": draw_codes(CodeLayout(SIGNED, 4, 64, has_offsets=True), 300, 20),
}


@pytest.mark.parametrize("codes", LONG.values(), ids=LONG)
def test_a_row_has_the_same_bits_alone_and_in_company(codes: Codes) -> None:
    weight, (multiply, _) = packed(codes), MULTIPLY.values()
    x, bias = torch.randn(max(STAGES) + 2, codes.values.shape[1]).bfloat16(), torch.randn(len(codes.values))
    together = multiply(x, weight, bias, torch.float32)
    check(together, x.double() @ define(codes).T + bias.double(), 4e-6)
    for rows in STAGES:
        alone = multiply(x[1 : rows - 2].contiguous(), weight, bias, torch.float32)
        assert torch.equal(alone, together[1 : rows - 2])


def test_parts_of_the_columns_depend_on_the_matrix() -> None:
    weight = packed(LONG["parts"])
    assert count_parts(weight) == 4
    assert count_parts(packed(LONG["offsets"])) == 1  # too few columns
    for num_panels, expected in ((64, 4), (100, 4), (128, 2), (255, 2), (256, 1)):
        codes = weight.codes[:1].expand(num_panels, *weight.codes.shape[1:])
        assert count_parts(replace(weight, codes=codes)) == expected


@each_product
def test_no_rows(compute: Callable[..., Tensor]) -> None:
    codes = MATRICES["4 bits"]
    assert compute(torch.empty(0, 1280), packed(codes), None, torch.float32).shape == (0, 70)


@each_product
def test_a_group_that_is_nan_spoils_its_row_only(compute: Callable[..., Tensor]) -> None:
    codes = MATRICES["4 bits"]
    scales = codes.scales.clone()
    scales[3, 1] = torch.nan
    actual = compute(torch.randn(2, 1280), packed(replace(codes, scales=scales)), None, torch.float32)
    assert actual.isnan().nonzero()[:, 1].unique().tolist() == [3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_take_16_bits_if_that_is_exact(dtype: torch.dtype) -> None:
    codes = MATRICES["4 bits"]
    tiny = 2.0**-40 if dtype == torch.bfloat16 else 1.0  # that float16 cannot hold
    scales = ((torch.rand_like(codes.scales) + 0.1) * tiny).to(dtype).float()
    assert packed(replace(codes, scales=scales)).scales.dtype == dtype


def test_zeros_that_no_format_has_are_refused() -> None:
    codes = MATRICES["4 bits, zeros"]
    assert codes.zeros is not None
    with pytest.raises(WeightsError, match=r"^random codes has zero points outside the range of its codes$"):
        packed(replace(codes, zeros=codes.zeros + 5000))


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if not each.is_reordered])
def test_memory_is_as_estimated(layout: CodeLayout) -> None:
    in_features = 16 * OUTPUTS
    weight = packed(draw_codes(layout, in_features, 2 * OUTPUTS))
    planes = [x for x in (weight.codes, weight.scales, weight.zeros, weight.offsets) if x is not None]
    actual = sum(x.nbytes for x in planes) / (2 * OUTPUTS * in_features)
    assert count_bytes(layout) * 0.85 < actual < count_bytes(layout) * 1.01


def test_layouts_without_products_are_not_packed() -> None:
    assert not can_pack(CodeLayout(UNSIGNED, 4, 27, has_zeros=True))  # pieces would be too small
    assert not can_pack(CodeLayout(torch.int16, 8, 64))


def test_many_rows_are_multiplied_by_weights_in_memory() -> None:
    """Their numbers are rounded to the type of x first."""
    codes = draw_codes(LAYOUTS[0], 128, 70)
    x, bias = torch.randn(MAX_ROWS + 1, 128).bfloat16(), torch.randn(70)
    expected = x.double() @ define(codes).bfloat16().double().T
    linear, wide = (
        pack_product(TWINS, DrawnCodes(codes), CPU, x.dtype, is_wide) for is_wide in (False, True)
    )
    check(wide(x), expected, 2e-6)
    assert wide(x).dtype == torch.float32
    actual = linear.add_bias(x, bias)
    assert actual.dtype == x.dtype
    check(actual, expected + bias.bfloat16().double(), torch.finfo(x.dtype).eps)


@pytest.mark.parametrize("num_rows", [2, MAX_ROWS + 1])
def test_joined_products_split_the_bias(num_rows: int) -> None:
    all_codes = draw_codes(LAYOUTS[0], 128, 70), draw_codes(LAYOUTS[4], 128, 6)
    parts = [pack_product(TWINS, DrawnCodes(codes), CPU, torch.float32, False) for codes in all_codes]
    joined, x, bias = CudaJoinedProduct(parts), torch.randn(num_rows, 128), torch.randn(76)
    expected = x.double() @ torch.cat([define(codes) for codes in all_codes]).T
    check(joined(x), expected, 2e-6)
    check(joined.add_bias(x, bias), expected + bias.double(), 2e-6)


def test_x_of_another_type_is_rounded() -> None:
    codes = draw_codes(LAYOUTS[0], 128, 70)
    product = CudaCodeProduct(TWINS, packed(codes), torch.bfloat16, is_wide=True)
    x = torch.randn(3, 128)
    assert torch.equal(product(x), product(x.bfloat16()))
