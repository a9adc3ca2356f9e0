"""Smoothing of activations that are rounded to 8 bits, as in SmoothQuant (arXiv:2211.10438). Channels of a
norm's output are divided by factors, and the columns of the matrices that read it are multiplied by them. No
product changes, but outliers among the activations become smaller."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

Factors = Mapping[str, Tensor]
"""Factors, float32 [num_channels], by path of the norm that is divided by them and of the matrices whose
columns are multiplied by them."""
NO_FACTORS: Factors = MappingProxyType({})

_MAX_EXPONENT = 8  # keeps weights of 16 bits within their type


class ChannelRange(NamedTuple):
    """Largest magnitudes of each input channel of a matrix, float32 [num_channels]."""

    inputs: Tensor
    weights: Tensor


def choose_factors(channels: ChannelRange) -> Tensor:
    """Return factors that give inputs and weights of a channel about the same largest magnitude. They are
    powers of two, so that the multiplication rounds no weight, and inputs that differ in their last bits have
    the same factors."""
    exponents = (channels.inputs.log2() - channels.weights.log2()) / 2
    is_used = exponents.isfinite()
    if not is_used.any():
        return torch.ones_like(exponents)
    exponents = (exponents - exponents[is_used].median()).where(is_used, 0.0)
    return exponents.round().clamp(-_MAX_EXPONENT, _MAX_EXPONENT).exp2()
