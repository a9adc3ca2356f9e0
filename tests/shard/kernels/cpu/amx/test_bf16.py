"""Products with bfloat16 arithmetic on AMX tiles, emulated or real: against the manual's definition with the
C library's fused multiply-add, against double precision, and with the same bits in every batch."""

import ctypes
import logging
from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from tests.support.shard import guarded_memory
from tests.support.shard.emulated_tiles import compile_each_emulated
from tests.support.shard.products import check_not_finite, check_replay, check_rounding
from tgis.shard.checkpoint.tensors import TensorInMemory
from tgis.shard.kernels.cpu.amx import permission
from tgis.shard.kernels.cpu.bf16 import kernels as pair_kernels
from tgis.shard.kernels.cpu.bf16 import self_check, tile_product, tiles
from tgis.shard.kernels.cpu.bf16.product import pack_rounded
from tgis.shard.kernels.cpu.bf16.tiles import TileProductKernels
from tgis.shard.kernels.cpu.gemm import panels
from tgis.shard.kernels.cpu.ops import CPU_KERNELS
from tgis.shard.kernels.cpu.pointwise.activations import GATED_KINDS

pytestmark = pytest.mark.skipif(panels.PANEL != 32, reason="processors with AMX have AVX-512")

SHAPES = [(1, 1), (33, 7), (1500, 40), (64, 32), (513, 97)]  # input and output sizes
COUNTS = [1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 64, 127, 128, 129, 144, 145]


@pytest.fixture(scope="module", params=["emulated", "the processor's"])
def kernels(request: pytest.FixtureRequest) -> TileProductKernels:
    if request.param == "emulated":
        names = ("amx.inner_loop", "bf16.tiles")
        return TileProductKernels(*compile_each_emulated(names, lambda module: module.TILE_KERNELS))
    if tiles.TILE_KERNELS is None or permission.ask() is not None:
        pytest.skip("there is no AMX, or the system does not permit it")
    return tiles.TILE_KERNELS


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)


def pack(weight: Tensor, kernels: TileProductKernels) -> tile_product.TileProduct:
    return tile_product.pack(TensorInMemory(weight, "a weight"), kernels)


def flush(x: float) -> float:
    return x if abs(x) >= 2**-126 or x != x else 0.0


def multiply_by_the_manual(x: Tensor, weight: Tensor) -> npt.NDArray[np.float32]:
    fma = ctypes.CDLL("libm.so.6").fmaf
    fma.argtypes, fma.restype = [ctypes.c_float] * 3, ctypes.c_float
    y = np.zeros((len(x), len(weight)), np.float32)
    for cell in np.ndindex(*y.shape):
        pairs = list(zip(x[cell[0]].bfloat16().tolist(), weight[cell[1]].bfloat16().tolist(), strict=True))
        for begin in range(0, len(pairs), 32):
            chains = [0.0, 0.0]
            for k, (one, other) in enumerate(pairs[begin : begin + 32]):
                chains[k % 2] = flush(fma(flush(one), flush(other), chains[k % 2]))
            both = flush(float(np.float32(chains[0]) + np.float32(chains[1])))
            y[cell] = flush(float(y[cell] + np.float32(both)))
    return y


def test_sums_are_those_of_the_manual(kernels: TileProductKernels) -> None:
    weight, x = torch.randn(35, 530), torch.randn(18, 530)
    actual = pack(weight, kernels)(x)
    assert np.array_equal(actual.numpy(), multiply_by_the_manual(x, weight))
    assert torch.equal(self_check.multiply_plainly_by_tiles(x, weight), actual), "the self-check"
    assert not torch.equal(self_check.multiply_plainly(x, weight), actual), "one chain gives other bits"


def test_tiny_numbers_are_zeros(kernels: TileProductKernels) -> None:
    """Tiny factors, sums within chains, and sums of both chains are flushed."""
    weight = torch.tensor([[1.0, 1.0], [2.0**-130, 1.0], [1.0, -1.0], [2.0**-30, 2.0**30]])
    x = torch.tensor([[2.0**-127, 1.0], [1.5 * 2.0**-126, 2.0**-126], [2.0**100, 2.0**-100], [1.0, 1.0]])
    assert np.array_equal(pack(weight, kernels)(x).numpy(), multiply_by_the_manual(x, weight))
    assert pack(weight, kernels)(x)[1, 2] == 0, "two sums leave 2**-127"


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_rows_are_independent(kernels: TileProductKernels, in_features: int, out_features: int) -> None:
    weight, x = torch.randn(out_features, in_features), torch.randn(145, in_features)
    product = pack(weight, kernels)
    whole, factors = product(x), (x.bfloat16().double(), weight.bfloat16().double().t())
    scale = factors[0].abs() @ factors[1].abs()
    assert ((whole - factors[0] @ factors[1]).abs() <= 2**-24 * in_features**0.5 * 4 * scale).all()
    for count in COUNTS:
        assert torch.equal(product(x[:count]), whole[:count]), f"{count} rows"
        assert torch.equal(product(x[-count:]), whole[-count:]), f"{count} rows"
    assert product(x[:0]).shape == (0, out_features)


@pytest.mark.parametrize(
    ("num_rows", "in_features", "out_features"), [(1, 1, 1), (17, 33, 40), (145, 544, 65)]
)
def test_nothing_else_is_read_or_written(
    kernels: TileProductKernels,
    num_rows: int,
    in_features: int,
    out_features: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, x = torch.randn(out_features, in_features), torch.randn(num_rows, in_features)
    expected = pack(weight, kernels)(x)
    monkeypatch.setattr(tile_product, "empty", guarded_memory.empty)
    monkeypatch.setattr(panels.arena, "allocate", guarded_memory.allocate)
    guarded = guarded_memory.empty(num_rows, in_features).copy_(x)
    assert torch.equal(pack(weight, kernels)(guarded), expected)


def test_rounded_rows_are_read_where_they_are_whole_tiles(kernels: TileProductKernels) -> None:
    x = torch.randn(37, 96)
    product = pack(torch.randn(70, 96), kernels)
    assert torch.equal(product(x.bfloat16()), product(x))
    with pytest.raises(AssertionError):
        pack(torch.randn(70, 97), kernels)(torch.randn(3, 97).bfloat16())


@pytest.mark.parametrize("name", GATED_KINDS)
def test_gated_products_equal_products_that_are_gated_and_rounded(
    kernels: TileProductKernels, name: str
) -> None:
    """Sizes have one panel of gates or several, and groups of rows with a rest."""
    for num_rows, in_features, size in ((1, 33, 32), (16, 64, 96), (300, 300, 320), (130, 64, 32 * 40)):
        x, product = 3 * torch.randn(num_rows, in_features), pack(torch.randn(2 * size, in_features), kernels)
        expected = CPU_KERNELS.multiply_gated(product(x), name).bfloat16()
        assert torch.equal(product.multiply_gated(x, name), expected)
        if product.reads_rounded:
            assert torch.equal(product.multiply_gated(x.bfloat16(), name), expected)
    assert not pack(torch.randn(48, 32), kernels).can_gate
    assert not pack(torch.randn(32, 32), kernels).can_gate


def test_gated_products_write_nothing_else(
    kernels: TileProductKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, product = torch.randn(145, 544), pack(torch.randn(128, 544), kernels)
    expected = product.multiply_gated(x, "silu")
    monkeypatch.setattr(tile_product, "empty", guarded_memory.empty)
    guarded = guarded_memory.empty(*x.shape).copy_(x)
    torch.set_num_threads(2)
    assert torch.equal(product.multiply_gated(guarded, "silu"), expected)


def test_a_captured_gated_product_reads_the_current_x(kernels: TileProductKernels) -> None:
    product = pack(torch.randn(64, 41), kernels)
    check_replay(partial(product.multiply_gated, name="silu"), torch.randn(3, 41))


def test_bits_do_not_depend_on_threads(kernels: TileProductKernels) -> None:
    weight, x = torch.randn(10 * 32 + 3, 701), torch.randn(450, 701)
    product = pack(weight, kernels)
    expected = product(x)
    for num_threads in (2, 3):
        torch.set_num_threads(num_threads)
        for count in (1, 2, 449, 450):
            assert torch.equal(product(x[:count]), expected[:count]), f"{count} rows, {num_threads} threads"


def test_a_captured_product_reads_the_current_x(kernels: TileProductKernels) -> None:
    check_replay(pack(torch.randn(70, 41), kernels), torch.randn(3, 41))


def test_numbers_are_rounded_as_torch_does(kernels: TileProductKernels) -> None:
    check_rounding(partial(pack, kernels=kernels))


def test_infinity_and_nan_stay_in_their_row(kernels: TileProductKernels) -> None:
    check_not_finite(pack(torch.randn(40, 21), kernels), torch.randn(9, 21))


def test_tiles_are_chosen_where_they_are_right(
    kernels: TileProductKernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tiles, "TILE_KERNELS", kernels)
    with caplog.at_level(logging.INFO):
        choice = self_check.choose_packer(has_tiles=True)
    assert caplog.messages == ["products with bfloat16 arithmetic use AMX tiles"]
    assert isinstance(choice.pack, partial)
    assert (choice.pack.func, choice.replaced) == (tile_product.pack, ())
    x, weight = torch.randn(20, 40), torch.randn(3, 40)
    product = choice.pack(TensorInMemory(weight, "a weight"))
    assert np.array_equal(product(x).numpy(), multiply_by_the_manual(x, weight))
    assert not isinstance(self_check.choose_packer(has_tiles=False).pack, partial)


def test_wrong_tiles_are_replaced(
    kernels: TileProductKernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that sums in one chain simulates tiles that add in another order."""
    monkeypatch.setattr(tiles, "TILE_KERNELS", kernels)
    monkeypatch.setattr(pair_kernels, "MULTIPLY_PAIRS", None)
    monkeypatch.setattr(tile_product, "pack", lambda weight, kernels: pack_rounded(weight))
    assert self_check.choose_packer(has_tiles=True) == (pack_rounded, ("multiply_tiles",))
    assert caplog.messages[0].startswith("CPU kernel multiply_tiles is replaced by one without AMX")
