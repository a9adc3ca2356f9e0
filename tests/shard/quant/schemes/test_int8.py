"""Rounding to 8 bits, value by value against numpy, and the layers to which it applies."""

import math

import numpy as np
import pytest
import torch

from tgis.shard.checkpoint.codes import Codes
from tgis.shard.checkpoint.tensors import TensorInMemory
from tgis.shard.quant.interface import MatrixRole
from tgis.shard.quant.registry import find_scheme
from tgis.shard.quant.schemes.int8 import GROUP, LAYOUT, Rounded


def round_weights(weights: torch.Tensor) -> Codes:
    return Rounded(TensorInMemory(weights, "a weight")).codes()


@pytest.mark.parametrize("shape", [(1, 1), (40, 127), (70, 128), (33, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_are_rounded_by_the_rule(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = (torch.randn(shape) * torch.randn(shape[0], 1).exp()).to(dtype)
    codes = round_weights(weights)
    assert codes.layout == LAYOUT
    for begin in range(0, shape[1], GROUP):
        group = weights[:, begin : begin + GROUP].float().numpy()
        largest = np.abs(group).max(1, keepdims=True)
        rounded = np.rint(group * (np.float32(127) / largest))
        assert np.array_equal(codes.values[:, begin : begin + GROUP].numpy(), rounded)
        assert np.array_equal(codes.scales[:, begin // GROUP].numpy(), largest[:, 0] / np.float32(127))


def test_groups_of_zeros_infinity_and_nan() -> None:
    weights = torch.ones(4, 2 * GROUP)
    weights[0, :GROUP], weights[1, :GROUP] = 0, 1e-31
    weights[2, 3], weights[3, 5] = math.inf, math.nan
    codes = round_weights(weights)
    assert not codes.values[:2, :GROUP].any()
    assert not codes.scales[:2, 0].any()
    assert codes.scales[2:, 0].isnan().all()
    assert torch.equal(codes.scales[:, 1], torch.full((4,), 1 / 127))


def test_a_part_is_rounded_by_itself() -> None:
    weights = torch.randn(20, 300)
    part = Rounded(TensorInMemory(weights, "a weight")).codes(slice(3, 9), slice(50, 250))
    assert torch.equal(part.dequantize(), round_weights(weights[3:9, 50:250]).dequantize())
    assert (part.dequantize() - weights[3:9, 50:250]).abs().max() <= part.scales.max() / 2 * (1 + 1e-5)


@pytest.mark.parametrize(
    ("role", "is_rounded"), [("linear", True), ("head", True), ("replicated", False), ("table", False)]
)
def test_the_scheme_decides_by_role(role: MatrixRole, is_rounded: bool) -> None:
    stored = TensorInMemory(torch.randn(4, 4), "a weight")
    assert isinstance(find_scheme("int8").encode(role, stored), Rounded) is is_rounded
    assert find_scheme(None).encode(role, stored) is stored
