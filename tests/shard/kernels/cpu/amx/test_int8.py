"""int8 products on AMX tiles, emulated or real: the bits of products without tiles, which have their own
oracles."""

import logging
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.support.shard import guarded_memory
from tests.support.shard.emulated_tiles import compile_emulated
from tgis.shard.checkpoint.tensors import TensorInMemory
from tgis.shard.kernels.cpu.amx import permission
from tgis.shard.kernels.cpu.gemm import panels
from tgis.shard.kernels.cpu.int8 import inner_loop, kernels, product, self_check
from tgis.shard.kernels.cpu.jit.compiler import Kernel
from tgis.shard.quant.schemes.int8 import Rounded

# Compiling the emulation takes seconds.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        inner_loop.INSTRUCTION_SET is not inner_loop.AVX512_VNNI,
        reason="processors with AMX have AVX512_VNNI",
    ),
]

# Input and output sizes: whole and partial groups of 128, tiles and quads.
SHAPES = [(1, 1), (128, 32), (64, 33), (66, 40), (1500, 70), (257, 97), (700, 31)]
COUNTS = [1, 16, 17, 31, 32, 33, 48, 49, 96, 97, 145]


@pytest.fixture(scope="module", params=["emulated", "the processor's"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    if request.param == "emulated":
        return compile_emulated(("amx.inner_loop", "int8.tiles", "int8.kernels"), "MULTIPLY_INT8_TILES")
    if kernels.MULTIPLY_INT8_TILES is None or permission.ask() is not None:
        pytest.skip("there is no AMX, or the system does not permit it")
    return kernels.MULTIPLY_INT8_TILES


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)


def stored(weight: Tensor) -> Rounded:
    return Rounded(TensorInMemory(weight, "a weight"))


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_bits_are_those_without_tiles(kernel: Kernel, in_features: int, out_features: int) -> None:
    weight, x = stored(torch.randn(out_features, in_features)), torch.randn(145, in_features)
    actual, expected = product.pack(weight, kernel), product.pack(weight)
    for count in COUNTS:
        assert torch.equal(actual(x[:count]), expected(x[:count])), f"{count} rows"
    torch.set_num_threads(3)
    assert torch.equal(actual(x), expected(x)), "on several threads"
    assert actual(x[:0]).shape == (0, out_features)


@pytest.mark.parametrize(
    ("num_rows", "in_features", "out_features"), [(17, 1, 1), (33, 132, 40), (49, 256, 32)]
)
def test_nothing_else_is_read_or_written(
    kernel: Kernel, num_rows: int, in_features: int, out_features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = stored(torch.randn(out_features, in_features)), torch.randn(num_rows, in_features)
    expected = product.pack(weight)(x)
    monkeypatch.setattr(product, "empty", guarded_memory.empty)
    monkeypatch.setattr(panels.arena, "allocate", guarded_memory.allocate)
    guarded = guarded_memory.empty(num_rows, in_features).copy_(x)
    assert torch.equal(product.pack(weight, kernel)(guarded), expected)


def test_the_largest_sums_are_exact(kernel: Kernel) -> None:
    signs = torch.tensor([1.0, -1.0])
    x, weight = signs.repeat(10).unsqueeze(1).expand(20, 512) * 127, signs.unsqueeze(1).expand(2, 512) * 127
    y = product.pack(stored(weight), kernel)(x.contiguous())
    assert torch.equal(y, signs.repeat(10).outer(signs) * 127 * 127 * 512)


def test_infinity_and_nan_stay_in_their_row_and_column(kernel: Kernel) -> None:
    x, weight = torch.randn(40, 200), torch.randn(20, 200)
    x[2, 150], x[4, 3], x[5, :], weight[7, 199] = math.nan, -math.inf, 0, math.inf
    actual, expected = product.pack(stored(weight), kernel)(x), product.pack(stored(weight))(x)
    assert actual[2].isnan().all()
    assert torch.equal(actual.nan_to_num(7), expected.nan_to_num(7))


def test_tiles_are_chosen_where_they_are_right(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "MULTIPLY_INT8_TILES", kernel)
    assert self_check.choose_kernel(has_tiles=False) == (kernels.multiply_int8, ())
    with caplog.at_level(logging.INFO):
        assert self_check.choose_kernel(has_tiles=True) == (kernel, ())
    assert caplog.messages == ["products of int8 codes use AMX tiles for more than 16 rows"]


def test_wrong_tiles_are_replaced(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that does nothing simulates tiles with wrong sums."""
    monkeypatch.setattr(kernels, "MULTIPLY_INT8_TILES", Kernel(_do_nothing))
    assert self_check.choose_kernel(has_tiles=True) == (kernels.multiply_int8, ("multiply_int8_tiles",))
    [line] = caplog.messages
    assert line.startswith("CPU kernel multiply_int8_tiles is replaced by one without AMX")


def _do_nothing(args: object) -> None:
    pass
