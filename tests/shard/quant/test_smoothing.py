"""Factors that smooth activations: products of 8 bits against float64."""

import torch

from tgis.shard.checkpoint.tensors import ScaledColumns, TensorInMemory
from tgis.shard.kernels.cpu.int8 import product as int8
from tgis.shard.quant.schemes.int8 import Rounded
from tgis.shard.quant.smoothing import ChannelRange, choose_factors

SIZE = 256


def measure_error(x: torch.Tensor, weight: torch.Tensor, factors: torch.Tensor) -> float:
    """Return the mean error of a product whose weights and activations are rounded to 8 bits, relative to the
    mean magnitude of the exact product."""
    stored = ScaledColumns(TensorInMemory(weight, "a weight"), factors)
    exact = x.double() @ weight.double().T
    actual = int8.pack(Rounded(stored))(x / factors).double()
    return float((actual - exact).abs().mean() / exact.abs().mean())


def test_factors_reduce_the_error_of_outliers() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(32, SIZE), torch.randn(48, SIZE)
    x[:, 5::40] *= 100
    weight[:, 7::60] *= 30
    factors = choose_factors(ChannelRange(x.abs().amax(0), weight.abs().amax(0)))
    assert measure_error(x, weight, factors) < measure_error(x, weight, torch.ones(SIZE)) / 2


def test_factors_balance_inputs_and_weights() -> None:
    torch.manual_seed(0)
    inputs, weights = torch.randn(2, SIZE).mul(3).exp2()
    factors = choose_factors(ChannelRange(inputs, weights))
    assert torch.equal(factors.log2(), factors.log2().round())
    balance = (inputs / factors).log2() - (weights * factors).log2()
    assert (balance - balance.median()).abs().max() <= 2  # rounding changes either by the root of two


def test_channels_without_a_range_stay_as_they_are() -> None:
    inputs, weights = torch.tensor([1.0, 0.0, 16.0, torch.inf, 1.0]), torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    assert choose_factors(ChannelRange(inputs, weights)).tolist()[1::2] == [1, 1]
    assert choose_factors(ChannelRange(inputs, torch.zeros(5))).tolist() == [1] * 5
    assert choose_factors(ChannelRange(inputs * 1e30, weights)).isfinite().all()
