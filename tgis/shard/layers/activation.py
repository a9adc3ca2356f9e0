"""Activations of gated feed-forward layers, by the names that checkpoints give them."""

from collections.abc import Callable

from torch import Tensor

from tgis.shard.layers.kernels import Kernels

NAMES = ("silu",)


def gated(name: str, kernels: Kernels) -> Callable[[Tensor], Tensor]:
    """[num_tokens, 2 * size], gates before values -> activation(gate) * value, [num_tokens, size]."""
    return {"silu": kernels.silu_multiply}[name]
