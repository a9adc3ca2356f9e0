"""Products with codes on AMX tiles, emulated or real: against the order of additions in plain operations,
within the error bound of the definition, and with the same bits in every batch."""

import logging
import math
from collections.abc import Iterator, Mapping
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.support.shard import guarded_memory
from tests.support.shard.code_cases import CASES, INTEGERS, CodesInMemory, draw, expand
from tests.support.shard.emulated_tiles import compile_each_emulated
from tests.support.shard.gguf_tensors import NUM_COLUMNS, count_magnitudes, make_tensor
from tests.support.shard.products import check_accesses, check_not_finite, check_replay
from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.gguf.codes import CODINGS
from tgis.shard.kernels.cpu.amx import permission
from tgis.shard.kernels.cpu.bf16.self_check import multiply_plainly_by_tiles
from tgis.shard.kernels.cpu.codes import product
from tgis.shard.kernels.cpu.codes.layout import UNIT, Kind
from tgis.shard.kernels.cpu.codes.product import CodeProduct
from tgis.shard.kernels.cpu.codes.tile_kernels import CodeTileKernels
from tgis.shard.kernels.cpu.codes.tiles import kernels as tiles
from tgis.shard.kernels.cpu.codes.tiles import self_check
from tgis.shard.kernels.cpu.codes.tiles.chains import FEW_ROWS
from tgis.shard.kernels.cpu.codes.tiles.widening import find_pair_order
from tgis.shard.kernels.cpu.gemm import panels
from tgis.shard.kernels.cpu.jit.compiler import capture

pytestmark = pytest.mark.skipif(panels.PANEL != 32, reason="processors with AMX have AVX-512")

STEP = 2.0**-24  # rounding error of float32
# One of each way to read codes: words, bytes, and parts of packed codes.
MIXED = {
    **{
        name: CASES[name]
        for name in ("4 bits, zeros", "4 bits, groups of all sizes", "4 bits, small groups", "8 bits, zeros")
    },
    "5 bits": CASES["4 bits"]._replace(layout=CodeLayout(torch.int8, 5, 16, scale_type="float16")),
}
Kernels = Mapping[Kind, CodeTileKernels]
KINDS = tuple(Kind(bits, rounds_activations=False) for bits in (4, 5, 8))


@pytest.fixture(scope="module", params=[pytest.param("emulated", marks=pytest.mark.slow), "the processor's"])
def by_kind(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "emulated":
        names = ("amx.inner_loop", "codes.tiles.sums", "codes.tiles.panel", "codes.tiles.kernels")
        every = compile_each_emulated(
            names, lambda module: [module.KERNELS_ON_TILES[kind].multiply for kind in KINDS]
        )
        rounds = [tiles.round_rows_for_4_bits, *[tiles.round_rows_for_other_bits] * 2]
        return dict(zip(KINDS, map(CodeTileKernels, every, rounds), strict=True))
    if not tiles.KERNELS_ON_TILES or permission.ask() is not None:
        pytest.skip("there is no AMX, or the system does not permit it")
    return {kind: each for kind, each in tiles.KERNELS_ON_TILES.items() if not kind.rounds_activations}


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)


def pack(codes: Codes, by_kind: Kernels) -> CodeProduct:
    packer = product.find_packer(codes.layout, rounds_activations=False, tile_kernels=by_kind)
    assert packer is not None
    packed = packer(CodesInMemory(codes))
    assert isinstance(packed, CodeProduct)
    return packed


@pytest.mark.parametrize(("bits", "group", "width"), [(4, 32, 200), (4, 128, 384), (8, 64, 130), (4, 16, 32)])
def test_additions_have_the_order_of_the_documentation(
    by_kind: Kernels, bits: int, group: int, width: int
) -> None:
    codes = draw(CASES["4 bits"]._replace(layout=CodeLayout(torch.int8, bits, group), num_columns=width), 70)
    x = torch.randn(19, width)
    places = torch.arange(width).view(-1, UNIT)[:, find_pair_order(bits)] if width % UNIT == 0 else None
    total = torch.zeros(19, 70)
    for number, first in enumerate(range(0, width, group)):
        columns = torch.arange(first, min(first + group, width))
        order = columns if places is None else places[first // UNIT : (first + group) // UNIT].flatten()
        sums = multiply_plainly_by_tiles(x[:, order], codes.values[:, order].float())
        scaled = sums.double() * codes.scales[:, number].double()
        total = (total.double() + scaled).float()
    for count in (1, FEW_ROWS, FEW_ROWS + 1, 19):
        assert torch.equal(pack(codes, by_kind)(x[:count]), total[:count]), f"{count} rows"


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize(("num_rows", "out_features"), [(1, 70), (7, 3), (33, 129)])
def test_sums_are_within_the_bound_of_their_roundings(
    by_kind: Kernels, name: str, num_rows: int, out_features: int
) -> None:
    codes, x = draw(CASES[name], out_features), torch.randn(num_rows, CASES[name].num_columns)
    numbers, zeros, scales = expand(codes)
    rounded = x.bfloat16().double()
    centre = 0 if codes.layout.dtype == torch.int8 else 1 << (codes.layout.bits - 1)
    magnitudes = rounded.abs() @ (((numbers - centre).abs() + (zeros - centre).abs()) * scales).T
    # As in float32, but half as many additions follow each other, and four are added per 32 columns.
    bound = (128 + 20 + -(-x.shape[1] // 16)) * STEP * magnitudes
    actual = pack(codes, by_kind)(x)
    assert ((actual.double() - rounded @ ((numbers - zeros) * scales).T).abs() <= bound).all()


@pytest.mark.parametrize("name", CODINGS)
def test_types_of_gguf_files(by_kind: Kernels, name: str) -> None:
    """Check the scales, offsets and factors of each type."""
    tensor, values = make_tensor(name)
    layout = CODINGS[name].layout
    packer = product.find_packer(layout, rounds_activations=False, tile_kernels=by_kind)
    assert packer is not None
    multiply, x = packer(tensor), torch.randn(17, NUM_COLUMNS)
    rounded = x.bfloat16().double() if multiply.tiles else x.double()
    bound = (32 + 20 + 2 * NUM_COLUMNS / 16) * STEP * (rounded.abs() @ count_magnitudes(tensor.codes()).T)
    y = multiply(x)
    assert ((y.double() - rounded @ values.double().T).abs() <= bound).all()
    assert torch.equal(multiply(x[:1]), y[:1])


@pytest.mark.parametrize("name", MIXED)
def test_rows_are_independent(by_kind: Kernels, name: str) -> None:
    multiply, x = pack(draw(MIXED[name], 300), by_kind), torch.randn(97, MIXED[name].num_columns)
    whole = multiply(x)
    for count in (*range(1, 19), 31, 32, 33, 47):
        assert torch.equal(multiply(x[:count]), whole[:count]), f"{count} rows"
        assert torch.equal(multiply(x[-count:]), whole[-count:]), f"{count} rows"
    for num_threads in (2, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(multiply(x), whole), f"{num_threads} threads"
        assert torch.equal(multiply(x[:2]), whole[:2]), f"{num_threads} threads"
    assert multiply(x[:0]).shape == (0, 300)


def test_rows_of_large_products_are_independent(by_kind: Kernels) -> None:
    """A thread's copy of this number of rows exceeds its cache, so that rows are split."""
    multiply, x = pack(draw(CASES["4 bits"], 70), by_kind), torch.randn(403, 1280)
    whole = multiply(x)
    for first in range(0, 400, 13):
        assert torch.equal(multiply(x[first : first + 3]), whole[first : first + 3])


@pytest.mark.parametrize("num_rows", [17, 18])
def test_the_last_rows_of_wide_products_are_alone_in_a_cache(by_kind: Kernels, num_rows: int) -> None:
    """Each tile of rows fills a thread's cache, and the last tile has few rows."""
    multiply = pack(draw(CASES["4 bits"]._replace(num_columns=10368), 3), by_kind)
    x = torch.randn(num_rows, 10368)
    whole = multiply(x)
    assert torch.equal(multiply(x[16:]), whole[16:])


def test_tiny_numbers_are_zeros_in_every_batch(by_kind: Kernels) -> None:
    """Tiles flush numbers that other instructions do not."""
    codes = draw(CASES["4 bits"]._replace(num_columns=64), 20)
    x = torch.randn(9, 64) * 2.0 ** -torch.randint(90, 149, (9, 64))
    multiply = pack(codes, by_kind)
    whole = multiply(x)
    assert all(torch.equal(multiply(x[i : i + 1])[0], whole[i]) for i in range(9))
    assert (multiply(torch.full((3, 64), 2.0**-101)) == 0).all()


@pytest.mark.parametrize("name", MIXED)
def test_nothing_else_is_read_or_written(
    by_kind: Kernels, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = draw(MIXED[name], 65)
    for num_rows in (1, 17, 97):
        x = torch.randn(num_rows, MIXED[name].num_columns)
        check_accesses(partial(pack, codes, by_kind), x, pack(codes, by_kind)(x), monkeypatch)


def test_nothing_beyond_rounded_rows_is_read(by_kind: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's copy of some of these rows exceeds its cache, and no row follows the last whole tile."""
    codes, x = draw(CASES["4 bits, zeros"]._replace(num_columns=2048), 8), torch.randn(448, 2048)
    multiply = pack(codes, by_kind)
    expected = multiply(x)
    monkeypatch.setattr(product, "empty", guarded_memory.empty)
    assert torch.equal(multiply(x), expected)


@pytest.mark.parametrize("num_rows", [1, 9])
def test_a_captured_product_reads_the_current_x(by_kind: Kernels, num_rows: int) -> None:
    check_replay(pack(draw(MIXED["4 bits, zeros"], 70), by_kind), torch.randn(num_rows, 257))


@pytest.mark.parametrize(
    ("names", "rounds_activations", "num_rounds"),
    [
        (["Q4_0", "Q4_1", "Q4_K"], False, 1),
        (["Q8_0", "Q4_0", "Q4_1"], False, 2),  # pairs of 4-bit codes have an order of their own
        (["Q5_0", "Q6_K", "Q8_0"], False, 3),  # the second has smaller groups
        (["Q8_0", "Q4_0", "Q4_1"], True, 2),  # sums include scales if there are offsets
    ],
)
def test_joined_products_round_rows_once(names: list[str], rounds_activations: bool, num_rounds: int) -> None:
    if not tiles.KERNELS_ON_TILES or permission.ask() is not None:
        pytest.skip("there is no AMX, or the system does not permit it")
    products = []
    for name in names:
        packer = product.find_packer(CODINGS[name].layout, rounds_activations, tiles.KERNELS_ON_TILES)
        assert packer is not None
        products.append(packer(make_tensor(name)[0]))
    joined = product.JoinedProduct(products)
    for num_rows in (9, 64, 97):
        x = torch.randn(num_rows, NUM_COLUMNS)
        assert torch.equal(joined(x), torch.cat([each(x) for each in products], 1))
    with capture(torch.empty) as launches:
        joined(x)
    assert len(launches) == num_rounds + len(products)


def test_matrices_with_orders_of_their_own_are_rounded_alone(by_kind: Kernels) -> None:
    case = CASES["4 bits, groups of all sizes"]
    products, x = [pack(draw(case, 70), by_kind) for _ in range(2)], torch.randn(97, case.num_columns)
    expected = torch.cat([multiply(x) for multiply in products], 1)
    assert torch.equal(product.JoinedProduct(products)(x), expected)


@pytest.mark.parametrize("name", MIXED)
def test_infinity_and_nan_stay_in_their_row(by_kind: Kernels, name: str) -> None:
    multiply = pack(draw(MIXED[name], 20), by_kind)
    check_not_finite(multiply, torch.randn(9, MIXED[name].num_columns))
    assert not multiply(torch.full((1, MIXED[name].num_columns), math.inf)).isfinite().any()


def test_tables_use_tiles_if_bfloat16_holds_their_numbers(by_kind: Kernels) -> None:
    halves = tuple(number / 2 for number in range(-8, 8))
    codes = draw(CASES["a table"]._replace(layout=CodeLayout(torch.uint8, 4, 64, table=halves)), 70)
    x = torch.randn(5, 200)
    numbers, _, scales = expand(codes)
    multiply = pack(codes, by_kind)
    assert multiply.tiles is by_kind[KINDS[0]]
    expected = x.bfloat16().double() @ (numbers * scales).T
    bound = 1e-6 * (x.bfloat16().double().abs() @ (numbers * scales).abs().T)
    assert ((multiply(x) - expected).abs() <= bound).all()
    other = pack(draw(CASES["a table"], 70), by_kind)
    assert other.tiles is None


def test_the_self_check_accepts_correct_tiles(by_kind: Kernels, caplog: pytest.LogCaptureFixture) -> None:
    assert self_check.choose_tile_kernels(has_tiles=False, kernels=by_kind) == ({}, ())
    with caplog.at_level(logging.INFO):
        assert self_check.choose_tile_kernels(has_tiles=True, kernels=by_kind) == (by_kind, ())
    assert caplog.messages == ["products with codes of 2 to 8 bits use AMX tiles"]


def test_wrong_tiles_are_replaced(by_kind: Kernels, caplog: pytest.LogCaptureFixture) -> None:
    wrong = {KINDS[0]: by_kind[KINDS[2]]}  # reads words as bytes
    assert self_check.choose_tile_kernels(has_tiles=True, kernels=wrong) == (
        {},
        ("multiply_4_bits_on_tiles",),
    )
    assert caplog.messages[0].startswith("CPU kernel multiply_4_bits_on_tiles is replaced by one without AMX")


def test_a_row_is_rounded_like_torch_rounds_it(by_kind: Kernels) -> None:
    codes = Codes(CodeLayout(torch.int8, 4, 32), torch.ones(1, 32, dtype=torch.int8), torch.ones(1, 1))
    multiply = pack(codes, by_kind)
    bits = torch.randint(1 << 14, (64,)) + (1 << 14) << 16 | torch.tensor([0, 1, 0x7FFF, 0x8000]).repeat(16)
    numbers = bits.to(torch.int32).view(torch.float32)
    x: Tensor = torch.zeros(64, 32)
    x[:, 5] = numbers.nan_to_num(1.0)
    for rows in (x, x[:1]):
        assert torch.equal(multiply(rows)[:, 0], rows[:, 5].bfloat16().float())
