"""Products with bfloat16 arithmetic: against chains of the C library's fused multiply-adds, against double
precision, and with the same bits in every batch, for any number of threads, and without AVX512_BF16."""

import ctypes
import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.support.shard.products import check_not_finite, check_replay, check_rounding
from tgis.shard.checkpoint.tensors import TensorInMemory
from tgis.shard.kernels.cpu.bf16 import kernels, self_check
from tgis.shard.kernels.cpu.bf16.product import Packer, pack_rounded, pairs_packer
from tgis.shard.kernels.cpu.gemm import product as gemm
from tgis.shard.kernels.cpu.gemm.inner_loop import BLOCK, MANY_ROWS, ROWS
from tgis.shard.kernels.cpu.gemm.panels import PANEL

PACKERS = {"rounded": pack_rounded}
if kernels.MULTIPLY_PAIRS is not None:
    PACKERS["pairs"] = pairs_packer(kernels.MULTIPLY_PAIRS)
SHAPES = [(1, 1), (33, 7), (1500, 40), (2 * BLOCK, PANEL), (2 * BLOCK + 1, 3 * PANEL + 1)]
COUNTS = [*range(1, ROWS + 2), 2 * ROWS + 1, MANY_ROWS - 1, MANY_ROWS, MANY_ROWS + 13]


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)


@pytest.fixture(params=PACKERS)
def pack(request: pytest.FixtureRequest) -> Packer:
    return PACKERS[request.param]


def stored(weight: Tensor) -> TensorInMemory:
    return TensorInMemory(weight, "a weight")


def add_chain(x: Tensor, weight: Tensor) -> float:
    """Return the sum of products of two vectors, rounded to bfloat16, by the C library."""
    fma = ctypes.CDLL("libm.so.6").fmaf
    fma.argtypes, fma.restype = [ctypes.c_float] * 3, ctypes.c_float
    total = 0.0
    for one, other in zip(x.bfloat16().tolist(), weight.bfloat16().tolist(), strict=True):
        total = fma(one, other, total)
    return total


def test_each_sum_is_one_chain(pack: Packer) -> None:
    weight, x = torch.randn(PANEL + 2, 4 * BLOCK + 5), torch.randn(MANY_ROWS + 1, 4 * BLOCK + 5)
    y = pack(stored(weight))(x)
    for row in (0, ROWS, MANY_ROWS):
        assert y[row].tolist() == [add_chain(x[row], column) for column in weight]


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_rows_are_independent(pack: Packer, in_features: int, out_features: int) -> None:
    weight, x = torch.randn(out_features, in_features), torch.randn(MANY_ROWS + 13, in_features)
    product = pack(stored(weight))
    whole, factors = product(x), (x.bfloat16().double(), weight.bfloat16().double().t())
    scale = factors[0].abs() @ factors[1].abs()
    # A chain of k float32 additions. On average, the error is far below k roundings.
    assert ((whole - factors[0] @ factors[1]).abs() <= 2**-24 * in_features**0.5 * 4 * scale).all()
    # Rounding both factors changes a product by a relative 2**-8 plus the square of half of it.
    assert ((whole - x.double() @ weight.double().t()).abs() <= 2.01 * 2**-8 * scale).all()
    for count in COUNTS:
        assert torch.equal(product(x[:count]), whole[:count]), f"{count} rows"
        assert torch.equal(product(x[-count:]), whole[-count:]), f"{count} rows"
    assert product(x[:0]).shape == (0, out_features)
    assert torch.equal(pack_rounded(stored(weight))(x), whole), "without the instruction"


def test_bits_do_not_depend_on_threads_or_alignment(pack: Packer) -> None:
    weight, x = torch.randn(10 * PANEL + 3, 1701), torch.randn(450, 1701)
    product = pack(stored(weight))
    expected = product(x)
    for num_threads in (2, 3):
        torch.set_num_threads(num_threads)
        for count in (1, 2, 449, 450):
            assert torch.equal(product(x[:count]), expected[:count]), f"{count} rows, {num_threads} threads"
    room = torch.empty(5 * 1701 + 16)
    for offset in range(0, 16, 3):
        moved = room[offset : offset + 5 * 1701].view(5, 1701).copy_(x[:5])
        assert torch.equal(product(moved), expected[:5]), f"{4 * offset} bytes off"


def test_a_captured_product_reads_the_current_x(pack: Packer) -> None:
    check_replay(pack(stored(torch.randn(70, 41))), torch.randn(3, 41))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_rounded_as_torch_does(
    pack: Packer, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are packed in pieces, from memory with gaps that is released."""
    monkeypatch.setattr(gemm, "_PIECE", 2 * PANEL * 9)
    weight = torch.randn(7 * PANEL + 5, 18).to(dtype)[:, ::2]
    product, expected = pack(stored(weight)), weight.bfloat16().float().clone()
    weight.zero_()
    assert torch.equal(product(torch.eye(9)).t(), expected)


def test_numbers_are_rounded_as_torch_does(pack: Packer) -> None:
    check_rounding(lambda weight: pack(stored(weight)))


def test_infinity_and_nan_stay_in_their_row(pack: Packer) -> None:
    check_not_finite(pack(stored(torch.randn(40, 21))), torch.randn(9, 21))


def test_rows_with_gaps_are_refused(pack: Packer) -> None:
    """The kernel would read the gaps between rows."""
    product = pack(stored(torch.randn(40, 21)))
    with pytest.raises(AssertionError):
        product(torch.randn(9, 42)[:, ::2])


def test_the_kernel_for_this_processor(caplog: pytest.LogCaptureFixture) -> None:
    choice = self_check.choose_packer()
    assert choice.replaced == ()
    assert len(caplog.messages) == (kernels.MULTIPLY_PAIRS is None)
    assert all(self_check.is_exact(pack) for pack in (choice.pack, pack_rounded))


def test_wrong_instructions_are_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """float32 products simulate an instruction that does not round."""
    monkeypatch.setattr(kernels, "MULTIPLY_PAIRS", object())
    monkeypatch.setattr(
        self_check, "pairs_packer", lambda kernel: lambda weight: gemm.pack(weight, torch.float32)
    )
    assert self_check.choose_packer() == (pack_rounded, ("multiply_pairs",))
    [line] = caplog.messages
    assert line.startswith("CPU kernel multiply_pairs is replaced by rounding and float32 arithmetic")


def test_without_the_instruction(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kernels, "MULTIPLY_PAIRS", None)
    with caplog.at_level(logging.WARNING):
        assert self_check.choose_packer() == (pack_rounded, ())
    [line] = caplog.messages
    assert "no AVX512_BF16" in line


def test_plain_arithmetic_is_that_of_the_c_library() -> None:
    x, weight = torch.randn(3, 50), torch.randn(5, 50)
    expected = [[add_chain(row, column) for column in weight] for row in x]
    assert self_check.multiply_plainly(x, weight).tolist() == expected
