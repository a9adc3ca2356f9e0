"""Rotary position embedding (Su et al., "RoFormer", 2021) with the scalings that checkpoints use. Angles are
computed for each step's positions, so no table limits the length."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.shard.layers.ops import Kernels


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
class DynamicScaling:
    """Dynamic NTK scaling: a position p beyond the original length is rotated as in a sequence of p + 1
    tokens.

    growth = factor * (p + 1) / original_length - (factor - 1) divides the lowest frequency. The highest
    frequency does not change, and the divisors between them form a geometric sequence.

    transformers instead rotates all tokens of a prompt by the length of the whole prompt, so that a key
    depends on later tokens and on how a sequence is split into steps."""

    factor: float
    original_length: int


@dataclass(frozen=True)
class LongScaling:
    """Factors of the channels' wavelengths, [dim / 2] each. The long factors apply to all positions of a
    sequence that is longer than the original length. The amplitudes replace `Rope.amplitude`."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_length: int
    short_amplitude: float
    long_amplitude: float


@dataclass(frozen=True)
class ProportionalScaling:
    """Only the first pairs of channels are rotated, with the frequencies of a rotation of all channels
    divided by the factor."""

    num_pairs: int
    factor: float = 1.0


Scaling = ProportionalScaling | LinearScaling | Llama3Scaling | YarnScaling | DynamicScaling | LongScaling


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of `dim` channels. Cosines and sines are multiplied by `amplitude`."""

    dim: int
    theta: float
    scaling: Scaling | None = None
    amplitude: float = 1.0

    @property
    def switch_len(self) -> int:
        """Length beyond which all positions of a sequence use the long factors; 0 without such factors."""
        return self.scaling.original_length if isinstance(self.scaling, LongScaling) else 0


class Rotary:
    def __init__(self, rope: Rope, kernels: Kernels):
        self._scaling = rope.scaling
        self._kernels = kernels
        self._inv_freq = inverse_frequencies(rope).to(kernels.device)
        self._amplitudes = _amplitudes(rope).to(kernels.device)

    def __call__(self, positions: Tensor, is_long: Tensor | None = None) -> Tensor:
        """Return cosines and sines, [2, num_tokens, dim / 2], for positions int64 [num_tokens].

        is_long: bool [num_tokens], True in sequences longer than `switch_len`; None: there are none."""
        factor_sets = growth = None
        if isinstance(self._scaling, LongScaling) and is_long is not None:
            factor_sets = is_long.long()
        if isinstance(self._scaling, DynamicScaling):
            growth = _growth(positions, self._scaling)
        return self._kernels.angles(positions, self._inv_freq, self._amplitudes, factor_sets, growth)


def inverse_frequencies(rope: Rope) -> Tensor:
    """Return frequencies, float32 [num_sets, dim / 2]: one set, or two if short and long sequences differ."""
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, rope.dim, 2).float() / rope.dim))
    match rope.scaling:
        case LinearScaling(factor):
            inv_freq = inv_freq / factor
        case Llama3Scaling():
            inv_freq = _llama3(inv_freq, rope.scaling)
        case YarnScaling():
            inv_freq = _yarn(inv_freq, rope, rope.scaling)
        case ProportionalScaling(num_pairs, factor):
            inv_freq = inv_freq / factor
            inv_freq[num_pairs:] = 0
        case LongScaling(short, long):
            inv_freq = inv_freq / torch.tensor([short, long])
    return inv_freq.view(-1, rope.dim // 2)


def _amplitudes(rope: Rope) -> Tensor:
    """Return the amplitudes, float32 [num_sets]."""
    if isinstance(rope.scaling, LongScaling):
        return torch.tensor([rope.scaling.short_amplitude, rope.scaling.long_amplitude])
    return torch.tensor([rope.amplitude])


def _growth(positions: Tensor, scaling: DynamicScaling) -> Tensor:
    """Return the growth of `DynamicScaling`, float32 [num_tokens]. It is 1 up to the original length."""
    lengths = (positions + 1).double() / scaling.original_length
    return (scaling.factor * lengths - (scaling.factor - 1)).clamp(min=1).float()


def _llama3(inv_freq: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Stretch long wavelengths by the factor, keep short ones, and interpolate between them."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_length * inv_freq / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * kept + inv_freq / scaling.factor * (1 - kept)


def _yarn(inv_freq: Tensor, rope: Rope, scaling: YarnScaling) -> Tensor:
    """Scale by YaRN (Peng et al., 2023): as `_llama3`, but interpolate over channels, not over
    wavelengths."""

    def channel(turns: float) -> float:
        """Return the channel that rotates `turns` times over the original length."""
        ratio = math.log(scaling.original_length / (turns * 2 * math.pi)) / math.log(rope.theta)
        return rope.dim * ratio / 2

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2).float() - low) / (high - low if high != low else 0.001)
    stretched = ramp.clamp(0, 1)
    return inv_freq / scaling.factor * stretched + inv_freq * (1 - stretched)
