"""Products of linear layers that can be fused with a bias."""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor


class DeviceProduct(ABC):
    """`Product` that rounds x to the type of weights. Returns this type, or float32 if `is_wide`."""

    is_wide: bool

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def add_bias(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product plus `bias` in the type of weights. All calls must pass the same bias."""


class CudaProduct(DeviceProduct):
    """Product of cuBLAS with a weight [out_features, in_features]."""

    def __init__(self, weight: Tensor, is_wide: bool):
        self.weight = weight
        self.is_wide = is_wide
        self._bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)
        if not self.is_wide or x.dtype == torch.float32:
            return F.linear(x, self.weight)
        return multiply_wide(x, self.weight)

    def add_bias(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None and self._bias is None:
            self._bias = bias.to(self.weight.dtype)
        return F.linear(x.to(self.weight.dtype), self.weight, self._bias)


def multiply_wide(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T of 16-bit operands as float32."""
    if x.device.type == "cuda":
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())
