"""Normalisation, fused with the addition before it."""

from torch import Tensor

from tgis.shard.layers.kernels import Parts


class RMSNorm:
    def __init__(self, parts: Parts, path: str, size: int, eps: float):
        self._weight, self._eps = parts.read_vector(f"{path}.weight", size), eps
        self._norm = parts.kernels.rms_norm

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """The norm of x + delta, both [num_tokens, size]; x becomes the sum."""
        return self._norm(x, delta, self._weight, self._eps)
