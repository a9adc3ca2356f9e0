"""Elementwise operations and look-ups of rows: compiled kernels against torch."""

import pytest
import torch
from torch import Tensor
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from tgis.shard.collectives import CPU
from tgis.shard.kernels.cpu.ops import CPU_KERNELS
from tgis.shard.kernels.portable.ops import TorchKernels

PORTABLE = TorchKernels(CPU)
ROWS, SIZE = 5, 37


@pytest.fixture(params=["together", "apart"])
def x(request: pytest.FixtureRequest) -> Tensor:
    """Return contiguous rows, or rows with gaps that must not change."""
    whole = torch.randn(ROWS, SIZE + 6) * 3
    return whole[:, :SIZE] if request.param == "apart" else whole[:, :SIZE].contiguous()


@pytest.mark.parametrize("shape", [(SIZE,), (ROWS, SIZE)])
def test_sums(x: Tensor, shape: tuple[int, ...]) -> None:
    y = torch.randn(shape)
    expected = x + y
    assert CPU_KERNELS.add(x, y) is x
    assert x.equal(expected)


def test_a_factor(x: Tensor) -> None:
    expected = x * torch.tensor(0.3)
    assert CPU_KERNELS.scale(x, 0.3).equal(expected)


def test_factors_of_rows(x: Tensor) -> None:
    factors = torch.randn(ROWS)
    expected = x * factors.unsqueeze(1)
    assert CPU_KERNELS.scale_rows(x, factors) is x
    assert x.equal(expected)


def test_columns_side_by_side(x: Tensor) -> None:
    y = torch.randn(ROWS, 5)
    expected = torch.cat((x, y), 1)
    assert CPU_KERNELS.concatenate(x, y).equal(expected)
    assert PORTABLE.concatenate(x, y).equal(expected)


def test_factors_of_positions() -> None:
    positions = torch.tensor([0, 1, 7, 8, 15, 16, 100, 16383, 16384, 300000])
    for length in (8, 16384):
        expected = get_llama_4_attn_scale(positions[None], 0.3, length).flatten()
        torch.testing.assert_close(CPU_KERNELS.position_factors(positions, 0.3, length, 0), expected)
        torch.testing.assert_close(PORTABLE.position_factors(positions, 0.3, length, 0), expected)
        shifted = CPU_KERNELS.position_factors(positions, 0.3, length, 1)
        assert shifted.equal(CPU_KERNELS.position_factors(positions + 1, 0.3, length, 0))


def test_clamping_keeps_nan(x: Tensor) -> None:
    x[1, 2], x[2, 3] = torch.nan, torch.inf
    expected = x.clamp(-1.5, 1.5)
    assert CPU_KERNELS.clamp(x, 1.5).allclose(expected, equal_nan=True)


def test_a_soft_cap(x: Tensor) -> None:
    expected = torch.tanh(x / 2.5) * 2.5
    assert CPU_KERNELS.soft_cap(x, 2.5).allclose(expected, rtol=0, atol=2e-6)


def test_a_sigmoid(x: Tensor) -> None:
    whole = torch.randn(ROWS, SIZE + 3) * 30
    gate = whole[:, :SIZE]
    expected = x * torch.sigmoid(gate)
    assert PORTABLE.multiply_sigmoid(x.clone(), gate).allclose(expected)
    assert CPU_KERNELS.multiply_sigmoid(x, gate) is x
    assert x.allclose(expected, rtol=1e-6, atol=1e-9)


def test_gaps_between_rows_do_not_change() -> None:
    whole = torch.ones(ROWS, SIZE + 6)
    CPU_KERNELS.scale(whole[:, :SIZE], 2.0)
    assert whole[:, :SIZE].unique().tolist() == [2.0]
    assert whole[:, SIZE:].unique().tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_a_table(dtype: torch.dtype) -> None:
    table, ids = torch.randn(11, SIZE).to(dtype), torch.tensor([3, 0, 8, 3])
    assert CPU_KERNELS.look_up(table, ids).equal(table[ids].float())
    assert CPU_KERNELS.look_up(table, ids, 2).equal(table[ids + 2].float())


def test_ids_of_a_part_of_a_table() -> None:
    ids = torch.tensor([3, 0, 8, 7, 4, 99])
    for kernels in (CPU_KERNELS, PORTABLE):
        local, is_inside = kernels.select_ids(ids, 3, 8)
        assert local.tolist() == [0, 0, 0, 4, 1, 0]
        assert is_inside.tolist() == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
        assert local.dtype == torch.int64
        x = torch.full((6, 40), torch.nan)
        x[0] = 1.0
        cleared = kernels.clear_rows(x, torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]))
        assert cleared is x
        assert cleared[[1, 2, 3, 5]].eq(0).all()
        assert cleared[0].eq(1).all()
        assert cleared[4].isnan().all()
