"""Normalisation layers: of a whole width, fused with an addition before, or of one split over ranks."""

from typing import Literal

from torch import Tensor

from tgis.shard.layers.ops import HeadNorm, Parts

# "rms_plus_one" is for checkpoints that store the weight minus one.
NormKind = Literal["rms", "rms_plus_one", "layer", "layer_no_bias"]


class Norm:
    """`NormLayer` with the checkpoint's weight at `path`, and a bias if `kind` is "layer"."""

    def __init__(self, parts: Parts, path: str, size: int, eps: float, kind: NormKind):
        self.weight, self.eps = _read_weight(parts, path, size, kind), eps
        self.bias = parts.read_vector(f"{path}.bias", size) if kind == "layer" else None
        self.is_centred, self._kernels = kind in ("layer", "layer_no_bias"), parts.kernels

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        if self.is_centred:
            return self._kernels.layer_norm(x, delta, self.weight, self.bias, self.eps)
        return self._kernels.rms_norm(x, delta, self.weight, self.eps)


class SplitNorm:
    """RMS norm of rows split over ranks. With fewer `pieces` than ranks, neighbours have the same piece."""

    def __init__(self, parts: Parts, path: str, size: int, pieces: int, eps: float):
        self._group, self._size, self._eps = parts.group, size, eps
        self._ranks_per_piece = parts.group.size // pieces
        self._weight = parts.read_vector(f"{path}.weight", size, [parts.group.slice(size, pieces)])

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise this rank's part, [num_tokens, own part of size]; return the same shape and type."""
        wide = x.float()
        squares = wide.square().sum(-1, keepdim=True)  # [num_tokens, 1]
        squares = self._group.all_gather(squares)[:, :: self._ranks_per_piece]  # [num_tokens, pieces]
        scale = (squares.sum(-1, keepdim=True) / self._size + self._eps).rsqrt()
        return (wide * scale * self._weight).to(x.dtype)


def read_head_norm(parts: Parts, path: str, head_dim: int, eps: float, kind: NormKind) -> HeadNorm:
    """Read the RMS norm of every head of queries and keys: {path}.q_norm and {path}.k_norm."""
    q_weight, k_weight = (_read_weight(parts, f"{path}.{x}_norm", head_dim, kind) for x in "qk")
    return HeadNorm(q_weight, k_weight, eps)


def _read_weight(parts: Parts, path: str, size: int, kind: NormKind) -> Tensor:
    """Read float32 [size]. One is added after rounding: 1 + weight in the weights' type would lose digits."""
    weight = parts.read_vector(f"{path}.weight", size)
    return weight + 1 if kind == "rms_plus_one" else weight
