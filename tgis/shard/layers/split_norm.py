"""Normalisation over a width that is split over ranks."""

from torch import Tensor

from tgis.shard.layers.ops import Parts


class SplitNorm:
    """RMS norm of rows that are split over ranks. If there are fewer `pieces` than ranks, neighbouring ranks
    have the same piece."""

    def __init__(self, parts: Parts, path: str, size: int, pieces: int, eps: float):
        self._group, self._size, self._eps = parts.group, size, eps
        self._ranks_per_piece = parts.group.size // pieces
        self._weight = parts.read_vector(f"{path}.weight", size, [parts.group.slice(size, pieces)])

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise this rank's part, [num_tokens, own part of size]; return the same shape."""
        squares = x.square().sum(-1, keepdim=True)  # [num_tokens, 1]
        squares = self._group.all_gather(squares)[:, :: self._ranks_per_piece]  # [num_tokens, pieces]
        scale = (squares.sum(-1, keepdim=True) / self._size + self._eps).rsqrt()
        return x * scale * self._weight
