"""Rotary position embedding with the frequency scalings that checkpoints use.

Angles are computed once a step for the step's positions: there is no table, and no length it would end at."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.shard.layers.kernels import Kernels


@dataclass(frozen=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True)
class YarnScaling:
    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class Rope:
    """`dim` channels are turned; cosines and sines are multiplied by `amplitude`."""

    dim: int
    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
    amplitude: float = 1.0


class Rotary:
    def __init__(self, rope: Rope, kernels: Kernels):
        self._inv_freq, self._amplitude, self._kernels = inverse_frequencies(rope), rope.amplitude, kernels

    def __call__(self, positions: Tensor) -> Tensor:
        """int64 [num_tokens] -> cosines and sines, [2, num_tokens, dim / 2]."""
        return self._kernels.angles(positions, self._inv_freq, self._amplitude)


def inverse_frequencies(rope: Rope) -> Tensor:
    """float32 [dim / 2]"""
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, rope.dim, 2).float() / rope.dim))
    match rope.scaling:
        case LinearScaling(factor):
            return inv_freq / factor
        case Llama3Scaling():
            return _llama3(inv_freq, rope.scaling)
        case YarnScaling():
            return _yarn(inv_freq, rope, rope.scaling)
    return inv_freq


def _llama3(inv_freq: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_length * inv_freq / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * kept + inv_freq / scaling.factor * (1 - kept)


def _yarn(inv_freq: Tensor, rope: Rope, scaling: YarnScaling) -> Tensor:
    """As llama3, but blended along the channels instead of along the wave lengths."""

    def channel(turns: float) -> float:
        """The channel that turns as often over the original length."""
        ratio = math.log(scaling.original_length / (turns * 2 * math.pi)) / math.log(rope.theta)
        return rope.dim * ratio / 2

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2).float() - low) / (high - low if high != low else 0.001)
    stretched = ramp.clamp(0, 1)
    return inv_freq / scaling.factor * stretched + inv_freq * (1 - stretched)
