"""Products with codes and rounded activations on AMX tiles, emulated or real: the bits of products without
tiles, which have their own oracles."""

import logging
from collections.abc import Iterator, Mapping
from functools import partial

import pytest
import torch

from tests.support.shard import guarded_memory
from tests.support.shard.code_cases import CASES, INTEGERS, CodesInMemory, draw
from tests.support.shard.emulated_tiles import compile_each_emulated
from tests.support.shard.gguf_tensors import NUM_COLUMNS, make_tensor
from tests.support.shard.products import check_accesses, check_not_finite, check_replay
from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.gguf.codes import CODINGS
from tgis.shard.kernels.cpu.amx import permission
from tgis.shard.kernels.cpu.codes import product
from tgis.shard.kernels.cpu.codes.integer_sums import CAN_ROUND
from tgis.shard.kernels.cpu.codes.layout import Kind
from tgis.shard.kernels.cpu.codes.product import NO_KERNELS, CodeProduct
from tgis.shard.kernels.cpu.codes.tile_kernels import CodeTileKernels
from tgis.shard.kernels.cpu.codes.tiles import kernels as tiles
from tgis.shard.kernels.cpu.codes.tiles import self_check
from tgis.shard.kernels.cpu.gemm import panels

pytestmark = pytest.mark.skipif(
    panels.PANEL != 32 or not CAN_ROUND, reason="processors with AMX have AVX512_VNNI"
)

Kernels = Mapping[Kind, CodeTileKernels]
# One of each way to read codes: words, and parts of packed codes.
KINDS = tuple(Kind(bits, rounds_activations=True) for bits in (4, 5, 8))
MIN_ROWS = 32
SHAPES = {
    **{name: CASES[name] for name in INTEGERS},
    "4 bits, groups of 64": CASES["4 bits"]._replace(layout=CodeLayout(torch.int8, 4, 64), num_columns=576),
    "4 bits, groups of 96": CASES["4 bits"]._replace(layout=CodeLayout(torch.int8, 4, 96), num_columns=250),
    "5 bits": CASES["4 bits"]._replace(layout=CodeLayout(torch.int8, 5, 16, scale_type="float16")),
    "5 bits, partial": CASES["4 bits"]._replace(
        layout=CodeLayout(torch.int8, 5, 32, scale_type="float16"), num_columns=77
    ),
}
MIXED = ("4 bits, zeros", "4 bits, groups of all sizes", "4 bits, groups of 96", "8 bits, zeros", "5 bits")


@pytest.fixture(scope="module", params=[pytest.param("emulated", marks=pytest.mark.slow), "the processor's"])
def by_kind(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "emulated":
        names = ("amx.inner_loop", "codes.tiles.sums", "codes.tiles.panel", "codes.tiles.kernels")
        every = compile_each_emulated(
            names, lambda module: [module.KERNELS_ON_TILES[kind].multiply for kind in KINDS]
        )
        rest = (tiles.round_rows_to_8_bits, 1, MIN_ROWS)
        return {kind: CodeTileKernels(each, *rest) for kind, each in zip(KINDS, every, strict=True)}
    if not tiles.KERNELS_ON_TILES or permission.ask() is not None:
        pytest.skip("there is no AMX, or the system does not permit it")
    return {kind: each for kind, each in tiles.KERNELS_ON_TILES.items() if kind.rounds_activations}


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)


def pack(codes: Codes, tile_kernels: Kernels = NO_KERNELS) -> CodeProduct:
    packer = product.find_packer(codes.layout, rounds_activations=True, tile_kernels=tile_kernels)
    assert packer is not None
    packed = packer(CodesInMemory(codes))
    assert isinstance(packed, CodeProduct)
    return packed


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("out_features", [3, 64, 129])
def test_bits_are_those_without_tiles(by_kind: Kernels, name: str, out_features: int) -> None:
    codes, x = draw(SHAPES[name], out_features), torch.randn(97, SHAPES[name].num_columns)
    actual, expected = pack(codes, by_kind), pack(codes)
    if actual.kind in by_kind:
        assert actual.tiles is by_kind[actual.kind]
    for count in (MIN_ROWS - 1, MIN_ROWS, MIN_ROWS + 1, 47, 53, 64, 97):
        assert torch.equal(actual(x[:count]), expected(x[:count])), f"{count} rows"
    for num_threads in (2, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(actual(x), expected(x)), f"{num_threads} threads"
        assert torch.equal(actual(x[:40]), expected(x[:40])), f"{num_threads} threads"


@pytest.mark.parametrize("name", [name for name in CODINGS if not CODINGS[name].layout.table])
def test_types_of_gguf_files(by_kind: Kernels, name: str) -> None:
    """Check the scales, offsets and factors of each type."""
    tensor, _ = make_tensor(name)
    packers = [
        product.find_packer(CODINGS[name].layout, rounds_activations=True, tile_kernels=each)
        for each in (by_kind, NO_KERNELS)
    ]
    x = torch.randn(70, NUM_COLUMNS)
    actual, expected = (packer(tensor)(x) for packer in packers if packer is not None)
    assert torch.equal(actual, expected)


def test_the_largest_sums_are_exact(by_kind: Kernels) -> None:
    signs = torch.tensor([1.0, -1.0])
    x = 127 * signs.repeat(20).unsqueeze(1).expand(40, 256).contiguous()
    values = torch.tensor([-128, 127], dtype=torch.int8).unsqueeze(1).expand(2, 256).contiguous()
    codes = Codes(CodeLayout(torch.int8, 8, 128), values, torch.ones(2, 2))
    assert torch.equal(pack(codes, by_kind)(x), x @ values.float().T)


@pytest.mark.parametrize("num_rows", [300, 448])
def test_bits_of_large_products(by_kind: Kernels, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounded rows exceed a thread's cache, so that they are split."""
    codes, x = draw(CASES["4 bits, zeros"]._replace(num_columns=4096), 70), torch.randn(num_rows, 4096)
    actual, expected = pack(codes, by_kind), pack(codes)(x)
    monkeypatch.setattr(product, "empty", guarded_memory.empty)
    assert torch.equal(actual(x), expected)


@pytest.mark.parametrize("num_rows", [33, 34])
def test_the_last_rows_of_wide_products_are_alone_in_a_cache(by_kind: Kernels, num_rows: int) -> None:
    """Each tile of rows fills a thread's cache, and the last tile has few rows."""
    codes = draw(CASES["4 bits"]._replace(num_columns=20608), 3)
    x = torch.randn(num_rows, 20608)
    assert torch.equal(pack(codes, by_kind)(x), pack(codes)(x))


@pytest.mark.parametrize("name", MIXED)
def test_nothing_else_is_read_or_written(
    by_kind: Kernels, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = draw(SHAPES[name], 65)
    for num_rows in (33, 97):
        x = torch.randn(num_rows, SHAPES[name].num_columns)
        check_accesses(partial(pack, codes, by_kind), x, pack(codes)(x), monkeypatch)


@pytest.mark.parametrize("num_rows", [40, 70])
def test_a_captured_product_reads_the_current_x(by_kind: Kernels, num_rows: int) -> None:
    check_replay(pack(draw(CASES["4 bits, zeros"], 70), by_kind), torch.randn(num_rows, 257))


@pytest.mark.parametrize("name", MIXED)
def test_infinity_and_nan_stay_in_their_row(by_kind: Kernels, name: str) -> None:
    multiply = pack(draw(SHAPES[name], 20), by_kind)
    check_not_finite(multiply, torch.randn(40, SHAPES[name].num_columns))


def test_the_self_check_accepts_correct_tiles(by_kind: Kernels, caplog: pytest.LogCaptureFixture) -> None:
    assert self_check.choose_rounded_kernels(has_tiles=False, kernels=by_kind) == ({}, ())
    with caplog.at_level(logging.INFO):
        assert self_check.choose_rounded_kernels(has_tiles=True, kernels=by_kind) == (by_kind, ())
    assert caplog.messages == ["products of many rows with codes and rounded activations use AMX tiles"]


def test_wrong_tiles_are_replaced(by_kind: Kernels, caplog: pytest.LogCaptureFixture) -> None:
    name = "multiply_4_bits_rounded_on_tiles"
    wrong = {KINDS[0]: by_kind[KINDS[2]]}  # reads words of 4 bits as words of 8 bits
    assert self_check.choose_rounded_kernels(has_tiles=True, kernels=wrong) == ({}, (name,))
    assert caplog.messages[0].startswith(f"CPU kernel {name} is replaced by one without AMX")
