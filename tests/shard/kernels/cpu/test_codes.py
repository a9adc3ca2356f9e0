"""Products with codes of weights: against the float64 definition within the error bound, with the same bits
in every batch, for any number of threads, in kernel graphs, and on other machines."""

import hashlib
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from numba.core.errors import NumbaWarning
from torch import Tensor

from tests.support.shard.code_cases import CASES, INTEGERS, CodesInMemory, draw, expand
from tests.support.shard.products import check_replay
from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.kernels.cpu.codes import kernels
from tgis.shard.kernels.cpu.codes import product as code_product
from tgis.shard.kernels.cpu.codes.integer_sums import CAN_ROUND
from tgis.shard.kernels.cpu.codes.layout import Kind
from tgis.shard.kernels.cpu.codes.product import CodeProduct
from tgis.shard.kernels.cpu.jit.compiler import Kernel
from tgis.shard.kernels.cpu.jit.llvm import has_feature

STEP = 2.0**-24  # rounding error of float32


def pack(codes: Codes, rounds_activations: bool = False) -> CodeProduct:
    actual = code_product.find_packer(codes.layout, rounds_activations)
    assert actual is not None
    return actual(CodesInMemory(codes))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def many_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("num_rows", "out_features"), [(1, 70), (7, 3), (33, 129)])
def test_sums_are_within_the_bound_of_their_roundings(name: str, num_rows: int, out_features: int) -> None:
    codes, x = draw(CASES[name], out_features), torch.randn(num_rows, CASES[name].num_columns)
    numbers, zeros, scales = expand(codes)
    expected = x.double() @ ((numbers - zeros) * scales).T
    # Within a piece of up to 128 columns there is one rounding per column and, in the sum of x that a zero
    # multiplies, one per eight columns; then one per piece. Half their range is subtracted from unsigned
    # codes.
    layout = codes.layout
    centre = 0 if layout.table or layout.dtype == torch.int8 else 1 << (layout.bits - 1)
    magnitudes = x.double().abs() @ (((numbers - centre).abs() + (zeros - centre).abs()) * scales).T
    bound = (128 + 20 + -(-x.shape[1] // 16)) * STEP * magnitudes
    actual = pack(codes)(x)
    assert actual.shape == expected.shape
    assert ((actual.double() - expected).abs() <= bound).all()


def round_groups(x: Tensor, codes: Codes) -> Tensor:
    """Round activations: integers up to 127 times a scale per group of up to 128 columns."""
    size, rounded = codes.layout.group or 128, torch.empty_like(x, dtype=torch.float64)
    parts = torch.arange(x.shape[1]).split(size)
    if codes.group_of is not None:
        parts = tuple((codes.group_of == g).nonzero().flatten() for g in range(codes.scales.shape[1]))
    for columns in parts:
        largest = x[:, columns].abs().amax(1, keepdim=True)
        rounded[:, columns] = (x[:, columns] * (127 / largest)).round().double() * (largest / 127).double()
    return rounded


@pytest.mark.skipif(not CAN_ROUND, reason="the processor has no AVX2, VNNI or ARM dot product")
@pytest.mark.parametrize("name", [name for name in INTEGERS if "cut" not in name and "sizes" not in name])
def test_rounded_activations(name: str) -> None:
    codes, x = draw(CASES[name], 70), torch.randn(13, CASES[name].num_columns)
    numbers, zeros, scales = expand(codes)
    product = pack(codes, rounds_activations=True)
    assert product.kind.rounds_activations
    expected = round_groups(x, codes) @ ((numbers - zeros) * scales).T
    # Sums of integers are exact; only scales, their products and sums of groups are rounded.
    magnitudes = round_groups(x, codes).abs() @ ((numbers - zeros).abs() * scales).T
    bound = (4 + -(-x.shape[1] // 16)) * STEP * magnitudes
    assert ((product(x).double() - expected).abs() <= bound).all()


@pytest.mark.skipif(not CAN_ROUND, reason="the processor has no AVX2, VNNI or ARM dot product")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero", [None, "least", "largest"])
@pytest.mark.parametrize("code", ["least", "largest", "both"])
def test_the_largest_integers_do_not_saturate(bits: int, zero: str | None, code: str) -> None:
    """Activations of equal magnitude become 127 and -127, so that sums in 16 bits have the largest possible
    magnitude."""
    largest, width = (1 << bits) - 1, 300
    numbers = {"least": torch.zeros(width), "largest": torch.full((width,), largest)}
    numbers["both"] = torch.where(torch.arange(width) // 2 % 2 == 0, 0, largest)
    layout = CodeLayout(torch.uint8, bits, 128, True)
    values = numbers[code].to(torch.uint8).expand(40, width).contiguous()
    centre = float(1 << (bits - 1))
    zeros = torch.full((40, 3), {None: centre, "least": 0.0, "largest": float(largest)}[zero])
    codes = Codes(layout, values, torch.ones(40, 3), zeros)
    signs = torch.stack([torch.ones(width), -torch.ones(width), torch.tensor([1.0, -1.0]).repeat(width // 2)])
    signs = torch.cat([signs, torch.where(numbers["both"] == 0, -1.0, 1.0).expand(20, width)])
    expected = 127 * signs.double() @ (values.double() - zeros[0, 0]).T
    for count in (1, 3, 23):
        actual = pack(codes, rounds_activations=True)(127 * signs[:count])
        assert torch.equal(actual.double(), expected[:count]), f"{count} rows"


@pytest.mark.skipif(not CAN_ROUND, reason="the processor has no AVX2, VNNI or ARM dot product")
@pytest.mark.parametrize("bits", [2, 3, 5, 6])
@pytest.mark.parametrize("is_largest", [False, True])
def test_the_largest_packed_integers_do_not_saturate(bits: int, is_largest: bool) -> None:
    width, code = 300, (1 << (bits - 1)) - 1 if is_largest else -(1 << (bits - 1))
    layout = CodeLayout(torch.int8, bits, 128, scale_type="float16")
    values = torch.full((40, width), code, dtype=torch.int8)
    codes = Codes(layout, values, torch.ones(40, 3))
    signs = torch.stack([torch.ones(width), -torch.ones(width), torch.tensor([1.0, -1.0]).repeat(width // 2)])
    signs = signs.repeat(8, 1)
    for count in (1, 3, 23):
        actual = pack(codes, rounds_activations=True)(127 * signs[:count])
        assert torch.equal(actual.double(), 127 * signs[:count].double() @ values.double().T), f"{count} rows"


@pytest.mark.parametrize("name", CASES)
def test_packing_does_not_depend_on_pieces_or_threads(
    name: str, many_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of 50 rows begin in the middle of panels."""
    codes = draw(CASES[name], 150)
    whole = pack(codes)
    monkeypatch.setattr(code_product, "_ROWS", 50 * CASES[name].num_columns)
    for num_threads in (1, torch.get_num_threads()):
        torch.set_num_threads(num_threads)
        assert torch.equal(pack(codes).panels, whole.panels)


@pytest.mark.parametrize("rounds_activations", [False, True])
@pytest.mark.parametrize(
    "name", ["4 bits", "4 bits, zeros", "8 bits", "4 bits, groups of all sizes", "a table"]
)
def test_rows_are_independent(name: str, rounds_activations: bool, many_threads: None) -> None:
    product = pack(draw(CASES[name], 300), rounds_activations)
    x = torch.randn(97, CASES[name].num_columns)
    whole = product(x)
    for count in (*range(1, 14), 47):
        assert torch.equal(product(x[:count]), whole[:count]), f"{count} rows"
        assert torch.equal(product(x[-count:]), whole[-count:]), f"{count} rows"
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        assert torch.equal(product(x), whole), f"{num_threads} threads"
    assert product(x[:0]).shape == (0, 300)


def test_rows_of_large_products_are_independent(many_threads: None) -> None:
    """A thread's copy of this number of rows exceeds its cache, so that rows are split."""
    product, x = pack(draw(CASES["4 bits"], 70)), torch.randn(203, 1280)
    whole = product(x)
    for first in range(0, 200, 9):
        assert torch.equal(product(x[first : first + 3]), whole[first : first + 3])


@pytest.mark.parametrize("rounds_activations", [False, True])
def test_a_captured_product_reads_the_current_x(rounds_activations: bool) -> None:
    check_replay(pack(draw(CASES["4 bits, zeros"], 70), rounds_activations), torch.randn(9, 257))


@pytest.mark.parametrize("rounds_activations", [False, True])
def test_infinity_and_nan_stay_in_their_row_and_column(rounds_activations: bool) -> None:
    codes, x = draw(CASES["4 bits, zeros"], 20), torch.randn(9, 257)
    expected = pack(codes, rounds_activations)(x)
    x[2, 150], x[4, 3], codes.scales[7, 5] = math.nan, -math.inf, math.nan
    y = pack(codes, rounds_activations)(x)
    assert not y[[2, 4]].isfinite().any()
    assert y[:, 7].isnan().all()
    others = [c for c in range(20) if c != 7]
    for row in (0, 1, 3, 5, 6, 7, 8):
        assert torch.equal(y[row, others], expected[row, others])


def test_memory_is_that_of_codes_and_scales() -> None:
    sizes = {"4 bits": 4 + 32 / 128, "8 bits": 8 + 32 / 128}
    for name, bits in sizes.items():
        product = pack(draw(CASES[name]._replace(num_columns=1280), 640))
        assert len(product.panels) * 8 == bits * 640 * 1280
        assert product.zeros is None
        assert CASES[name].layout.bytes_per_weight * 8 == bits
    symmetric = draw(CASES["4 bits, zeros"], 64)
    assert symmetric.zeros is not None
    symmetric.zeros.fill_(8)
    assert pack(symmetric).zeros is None
    assert pack(draw(CASES["4 bits, zeros"], 64)).zeros is not None


def test_zeros_beyond_the_codes_are_refused() -> None:
    codes = draw(CASES["4 bits, zeros"], 4)
    assert codes.zeros is not None
    codes.zeros[2, 1] = 200
    with pytest.raises(WeightsError, match=r"^a weight has zero points outside the range of its codes$"):
        pack(codes)


def test_layouts_without_products() -> None:
    for layout in (
        CodeLayout(torch.float8_e4m3fn, 8, None),
        CodeLayout(torch.int8, 8, 128, rounds_activations=True),
        CodeLayout(torch.uint8, 4, 8, True),
        CodeLayout(torch.uint8, 4, 64),
        CodeLayout(torch.uint8, 4, 131, True),
    ):
        assert code_product.find_packer(layout, rounds_activations=False) is None
    table = code_product.find_packer(CASES["a table"].layout, rounds_activations=True)
    if table is not None:  # only with look-ups
        assert not table(CodesInMemory(draw(CASES["a table"], 3))).kind.rounds_activations  # type: ignore[attr-defined]


def digest() -> str:
    """Return a hash of products of every kind and of several numbers of rows."""
    torch.manual_seed(1)
    result = hashlib.sha256()
    for name in INTEGERS:
        product, x = pack(draw(CASES[name], 70)), torch.randn(17, CASES[name].num_columns)
        for count in (17, 4, 1):
            result.update(product(x[:count]).numpy().tobytes())
    return result.hexdigest()


@pytest.mark.slow
def test_other_machines_give_the_same_bits() -> None:
    if not has_feature("avx512f"):
        pytest.skip("this machine is the other one")
    program = f"from {__name__} import code_product, digest; print(code_product.LANES, digest())"
    features = "+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+lzcnt,+movbe"
    env = os.environ | {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": features}
    done = subprocess.run([sys.executable, "-c", program], env=env, check=True, stdout=subprocess.PIPE)
    assert done.stdout.decode().split() == ["8", digest()]


@pytest.mark.parametrize("kind", [Kind(8, False), Kind(8, True)])
def test_code_is_cached(kind: Kind) -> None:
    """Numba warns about code that it cannot cache."""
    if kind.rounds_activations and not CAN_ROUND:
        pytest.skip("the processor has no AVX2, VNNI or ARM dot product")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NumbaWarning)
        assert Kernel(kernels.MULTIPLY[kind].function).address
    assert [str(each.message) for each in caught] == []
