"""Normalisation, fused with the addition before it."""

from torch import Tensor

from tgis.shard.layers.kernels import Parts


class RMSNorm:
    def __init__(self, parts: Parts, path: str, size: int, eps: float):
        stored = parts.weights.find(f"{path}.weight", (size,))
        self._weight, self._eps = stored.read().to(parts.dtype).float(), eps
        self._norm = parts.kernels.rms_norm

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """The norm of x + delta, both [num_tokens, size]; x becomes the sum."""
        return self._norm(x, delta, self._weight, self._eps)
