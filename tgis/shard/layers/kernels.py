"""What a platform provides to the layers, chosen once when a model is loaded, and what every layer is made
from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tgis.shard.weights import Weights
from tgis.shard.world import World


class Product(Protocol):
    """x W^T for a weight that has been packed."""

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features], newly allocated."""


class Kernels(Protocol):
    """Activations are float32 and contiguous; results are new tensors unless it says otherwise."""

    def pack(self, weight: Tensor, dtype: torch.dtype, label: str) -> Product:
        """weight: [out_features, in_features], not kept. `label` names it in warnings."""

    def rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """The norm of x + delta, [num_tokens, size]; x becomes that sum."""

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        """[num_tokens, 2 * size], gates before values -> silu(gate) * value, [num_tokens, size]."""

    def angles(self, positions: Tensor, inv_freq: Tensor, scale: float) -> Tensor:
        """positions: int64 [num_tokens] -> scaled cosines and sines, [2, num_tokens, len(inv_freq)]."""

    def split_heads(
        self, qkv: Tensor, num_heads: int, num_kv_heads: int, angles: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] -> q, k, v of [num_tokens, heads,
        head_dim].

        The first channels of q and k are turned by `angles`, as many as it has cosines and sines; channel i
        with channel i + half of them."""


@dataclass(frozen=True)
class Parts:
    """What a layer is made from. `dtype` is the type the weights are rounded to."""

    world: World
    weights: Weights
    dtype: torch.dtype
    kernels: Kernels

    def read_vector(self, path: str, length: int, rows: Sequence[slice] = (slice(None),)) -> Tensor:
        """The `rows` of a bias or a norm's weight, one after the other; float32. Raises WeightsError."""
        stored = self.weights.find(path, (length,))
        return torch.cat([stored.read(part) for part in rows]).to(self.dtype).float()
