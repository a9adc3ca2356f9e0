"""Products of layers with weights that are kept as codes."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tgis.shard.checkpoint.tensors import Stored
from tgis.shard.kernels.cuda.codes.multiply_codes import MAX_ROWS, STAGES
from tgis.shard.kernels.cuda.codes.packed import PackedCodes
from tgis.shard.kernels.cuda.codes.packing import pack
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.products.floats import DeviceProduct
from tgis.shard.kernels.cuda.products.wide import multiply_wide


class CudaCodeProduct(DeviceProduct):
    """Product with a matrix of codes."""

    def __init__(self, kernels: Implementations, weight: PackedCodes, dtype: torch.dtype, is_wide: bool):
        self.weight = weight
        self.is_wide = is_wide
        self._dtype = dtype
        self._kernels = kernels
        self._bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, None, torch.float32 if self.is_wide else self._dtype)

    def add_bias(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None and self._bias is None:
            self._bias = bias.to(self._dtype)
        return self._multiply(x, self._bias, self._dtype)

    def compile(self) -> None:
        """Compile the kernels for all numbers of rows, so that no step waits for a compiler."""
        for num_rows in (*STAGES, MAX_ROWS + 1):
            self(
                torch.zeros(
                    num_rows, self.weight.in_features, dtype=self._dtype, device=self.weight.codes.device
                )
            )

    def _multiply(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        x = x.to(self._dtype)
        if len(x) <= MAX_ROWS:
            return self._kernels.multiply_codes(x.contiguous(), self.weight, bias, dtype)
        weight = self._kernels.widen_codes(self.weight, self._dtype)
        if dtype == self._dtype:
            return F.linear(x, weight, bias)
        return multiply_wide(x, weight)


class CudaJoinedProduct(DeviceProduct):
    """Product with the concatenated rows of several matrices of codes."""

    def __init__(self, products: Sequence[CudaCodeProduct]):
        self._products = products
        self.is_wide = products[0].is_wide
        self._biases: list[Tensor | None] = [None] * len(products)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([product(x) for product in self._products], 1)

    def add_bias(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None and self._biases[0] is None:
            self._biases = list(torch.split(bias, [each.weight.out_features for each in self._products]))
        pairs = zip(self._products, self._biases, strict=True)
        return torch.cat([product.add_bias(x, part) for product, part in pairs], 1)


def pack_product(
    kernels: Implementations, weight: Stored, device: torch.device, dtype: torch.dtype, is_wide: bool
) -> CudaCodeProduct:
    """Pack a matrix of codes for products with x of type `dtype`. Raises WeightsError."""
    product = CudaCodeProduct(kernels, pack(weight, device), dtype, is_wide)
    if device.type == "cuda":
        product.compile()
    return product
