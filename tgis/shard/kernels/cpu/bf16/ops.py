"""`Kernels` of the CPU with bfloat16 arithmetic. The inputs of products on AMX tiles are rounded by the
operations that compute them, which saves kernels that only round, and memory for results in float32."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tgis.shard.checkpoint.tensors import Stored
from tgis.shard.kernels.cpu import ops
from tgis.shard.kernels.cpu.bf16.tile_product import TileProduct, empty_rounded
from tgis.shard.kernels.cpu.codes import product as code_product
from tgis.shard.kernels.cpu.codes.layout import Kind
from tgis.shard.kernels.cpu.codes.tile_kernels import CodeTileKernels
from tgis.shard.kernels.cpu.jit.compiler import Kernel
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.layers.ops import Activation, LinearLayer, NormLayer, Product, normalise
from tgis.shard.quant.interface import MatrixRole


class BfloatKernels(ops.CpuKernels):
    """Kernels with bfloat16 arithmetic, except for products where rounding matters (role "replicated")."""

    def __init__(
        self,
        pack_bfloat16: Callable[[Stored], Product],
        rounds_activations: bool = False,
        int8_kernel: Kernel | None = None,
        tile_kernels: Mapping[Kind, CodeTileKernels] = code_product.NO_KERNELS,
    ):
        super().__init__(rounds_activations, int8_kernel, tile_kernels)
        self._pack_bfloat16 = pack_bfloat16

    def pack(self, weight: Stored, dtype: torch.dtype, role: MatrixRole = "linear") -> Product:
        has_own = role == "replicated" or (role == "head" and self._rounds_activations)
        return super().pack(weight, dtype, role) if has_own else self._pack_bfloat16(weight)

    def norm_product(
        self,
        x: Tensor,
        delta: Tensor | None,
        norm: NormLayer | None,
        linear: LinearLayer,
        then: Activation | None,
        adapters: TokenAdapters | None,
        reader: LinearLayer | None = None,
    ) -> Tensor:
        if norm is not None and _reads_rounded(linear, adapters):
            x = _norm_rounded(x, delta, norm)
            delta = None
            norm = None
        if then is None or (gated := _find_gated(linear, then, reader, adapters)) is None:
            return super().norm_product(x, delta, norm, linear, then, adapters)
        return gated.multiply_gated(normalise(self, x, delta, norm), then.name)


def _reads_rounded(linear: LinearLayer, adapters: TokenAdapters | None) -> bool:
    """Return True if a layer can read an input that is rounded to bfloat16."""
    product = linear.input_product(adapters)
    return isinstance(product, TileProduct) and product.reads_rounded


def _norm_rounded(x: Tensor, delta: Tensor | None, norm: NormLayer) -> Tensor:
    """Return norm(x + delta), rounded to bfloat16. Overwrites x with the sum."""
    out = empty_rounded(*x.shape)
    if norm.is_centred:
        return ops.layer_norm(x, delta, norm.weight, norm.bias, norm.eps, out)
    return ops.rms_norm(x, delta, norm.weight, norm.eps, out)


def _find_gated(
    linear: LinearLayer, then: Activation, reader: LinearLayer | None, adapters: TokenAdapters | None
) -> TileProduct | None:
    """Return the layer's product if it can compute the activation of its result and round it for the
    reader."""
    biased = linear.as_product(adapters)
    if biased is None or biased.bias is not None or not isinstance(biased.product, TileProduct):
        return None
    is_read = reader is not None and _reads_rounded(reader, adapters)
    return biased.product if is_read and then.is_gated and biased.product.can_gate else None
