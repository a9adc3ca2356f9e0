"""Normalisation layers: over the whole width, fused with the preceding addition, or split over ranks."""

from typing import Literal

import torch
from torch import Tensor

from tgis.shard.layers.ops import HeadNorm, Parts

# "rms_plus_one": the checkpoint stores the weight minus one.
NormKind = Literal["rms", "rms_plus_one", "layer", "layer_no_bias"]


class Norm:
    """`NormLayer` with the checkpoint's weight at `path`, and a bias if `kind` is "layer". The result is
    multiplied by `scale`."""

    def __init__(self, parts: Parts, path: str, size: int, eps: float, kind: NormKind, scale: float = 1.0):
        self.weight = _read_weight(parts, path, size, kind) * scale
        self.eps = eps
        self.bias = parts.read_vector(f"{path}.bias", size) * scale if kind == "layer" else None
        if (factors := parts.factors.get(path)) is not None:
            self.weight = self.weight / factors
            self.bias = None if self.bias is None else self.bias / factors
        self.is_centred = kind in ("layer", "layer_no_bias")
        self._kernels = parts.kernels

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        if self.is_centred:
            return self._kernels.layer_norm(x, delta, self.weight, self.bias, self.eps)
        return self._kernels.rms_norm(x, delta, self.weight, self.eps)


class SplitNorm:
    """RMS norm of rows that are split over ranks. If there are fewer `pieces` than ranks, neighbours share
    one."""

    def __init__(self, parts: Parts, path: str, size: int, pieces: int, eps: float):
        self._group = parts.group
        self._size = size
        self._eps = eps
        self._ranks_per_piece = parts.group.size // pieces
        self._weight = parts.read_vector(f"{path}.weight", size, [parts.group.slice(size, pieces)])

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise this rank's part, [num_tokens, own part of size]. Return the same shape and type."""
        wide = x.float()
        squares = wide.square().sum(-1, keepdim=True)  # [num_tokens, 1]
        squares = self._group.all_gather(squares)[:, :: self._ranks_per_piece]  # [num_tokens, pieces]
        scale = (squares.sum(-1, keepdim=True) / self._size + self._eps).rsqrt()
        return (wide * scale * self._weight).to(x.dtype)


def read_head_norm(
    parts: Parts, path: str, head_dim: int, eps: float, kind: NormKind, has_keys: bool = True
) -> HeadNorm:
    """Read the RMS norm of every head of queries and keys: {path}.q_norm and, if the layer has keys,
    {path}.k_norm."""
    q_weight = _read_weight(parts, f"{path}.q_norm", head_dim, kind)
    k_weight = _read_weight(parts, f"{path}.k_norm", head_dim, kind) if has_keys else q_weight
    return HeadNorm(q_weight, k_weight, eps)


def make_bare_head_norm(parts: Parts, head_dim: int, eps: float) -> HeadNorm:
    """Return the RMS norm of every head of queries and keys without weights."""
    ones = torch.ones(head_dim, device=parts.kernels.device)
    return HeadNorm(ones, ones, eps)


def _read_weight(parts: Parts, path: str, size: int, kind: NormKind) -> Tensor:
    """Read float32 [size]. Adds one after the conversion, because 1 + weight would lose digits in `dtype`."""
    weight = parts.read_vector(f"{path}.weight", size)
    return weight + 1 if kind == "rms_plus_one" else weight
