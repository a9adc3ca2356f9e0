"""The convolution of recurrent layers against float64, with channels below, at and above a unit of work."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tgis.shard.kernels.cpu.states.convolution import CHANNELS
from tgis.shard.kernels.cpu.states.launch import convolve
from tgis.shard.memory.state_cache import StateCache, StateShape, StateSizes, StepStates

COUNTS = (1, 2, 40)  # new tokens of each sequence
SLOTS, LAYER = (2, 0, 1), 1


def open_states(kernel_size: int, width: int) -> StepStates:
    """Return states with random windows. The gate before the channels has `width` columns."""
    cache = StateCache(StateShape(2, StateSizes(1, width, 1, 1, kernel_size)), len(SLOTS))
    cache.windows(LAYER).copy_(torch.randn(cache.windows(LAYER).shape))
    return StepStates(cache, torch.tensor(SLOTS), torch.tensor([0, *itertools.accumulate(COUNTS)]))


def expect(inputs: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """Return the result for a window and the tokens after it, float64."""
    columns = inputs.double().T.unsqueeze(0)
    y = F.conv1d(columns, kernel.double().T.unsqueeze(1), bias.double(), groups=len(bias))
    return F.silu(y[0].T)


@pytest.mark.parametrize("width", [3, CHANNELS - 2, CHANNELS + 77])
@pytest.mark.parametrize("kernel_size", [1, 2, 4])
def test_equals_float64(kernel_size: int, width: int) -> None:
    torch.manual_seed(kernel_size * width)
    states = open_states(kernel_size, width)
    channels = states.cache.shape.sizes.num_channels
    # Some tokens have large inputs, whose activation is 0 or the input.
    rows = torch.randn(sum(COUNTS), width + channels + 1) * torch.tensor([1.0, 20.0]).repeat(22)[:43, None]
    kernel, bias = torch.randn(kernel_size, channels), torch.randn(channels)
    inputs = [
        torch.cat([states.cache.windows(LAYER)[slot], part[:, width:-1]])
        for slot, part in zip(SLOTS, rows.split(COUNTS), strict=True)
    ]
    y = convolve(rows, kernel, bias, LAYER, states)
    for slot, seen, part in zip(SLOTS, inputs, y.split(COUNTS), strict=True):
        torch.testing.assert_close(part.double(), expect(seen, kernel, bias), rtol=1e-5, atol=2e-5)
        assert torch.equal(states.cache.windows(LAYER)[slot], seen[len(seen) - kernel_size + 1 :])
    assert not states.cache.windows(1 - LAYER).any()
