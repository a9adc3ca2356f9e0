"""Products of linear layers that can be fused with a bias."""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from tgis.shard.kernels.cuda.few_rows.multiply_few import MAX_ROWS
from tgis.shard.kernels.cuda.products.few_rows import FewRows
from tgis.shard.kernels.cuda.products.wide import multiply_floats


class DeviceProduct(ABC):
    """`Product` that rounds x to the type of weights. Returns this type, or float32 if `is_wide`."""

    is_wide: bool

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def add_bias(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product plus `bias` in the type of weights. All calls must pass the same bias."""


class CudaProduct(DeviceProduct):
    """Product with a weight [out_features, in_features]: of cuBLAS, or of `multiply_few` for few rows if
    `few` says so."""

    def __init__(self, weight: Tensor, is_wide: bool, few: FewRows | None = None):
        self.weight = weight
        self.is_wide = is_wide
        self._few = few
        self._bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)
        if self._uses_few(x):
            return self._multiply_few(x, None, torch.float32 if self.is_wide else x.dtype)
        return multiply_floats(x, self.weight, self.is_wide)

    def add_bias(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None and self._bias is None:
            self._bias = bias.to(self.weight.dtype)
        x = x.to(self.weight.dtype)
        if self._uses_few(x):
            return self._multiply_few(x, self._bias, x.dtype)
        return F.linear(x, self.weight, self._bias)

    def multiply_parts(self, x: Tensor) -> Tensor | None:
        """Return partial sums of the product, float32 [num_parts, num_tokens, out_features], or None if the
        product has none. Their sum rounds to the same bits as the product."""
        if not self._uses_few(x):
            return None
        assert self._few is not None, "it is used"
        x = x.to(self.weight.dtype).contiguous()
        return self._few.multiply(x, self.weight, None, torch.float32, True)

    def leave_to_library(self) -> None:
        """Use cuBLAS for all numbers of rows, because another kernel multiplies this weight in most steps."""
        if self._few is not None:
            self._few.remove(self.weight)
            self._few = None

    def _uses_few(self, x: Tensor) -> bool:
        return self._few is not None and self._few.is_used and len(x) <= MAX_ROWS

    def _multiply_few(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert self._few is not None, "it is used"
        return self._few.multiply(x.contiguous(), self.weight, bias, dtype)
