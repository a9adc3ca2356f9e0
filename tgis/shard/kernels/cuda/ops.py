"""`Kernels` of GPUs: norms and activations of this package, and products of cuBLAS.

The residual stream, logits and "replicated" products are float32. Other activations have the weights' type,
except that branches of float16 models return float32, because some exceed the range of float16."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.tensors import Stored
from tgis.shard.kernels.cuda.codes.packing import can_pack, count_bytes
from tgis.shard.kernels.cuda.implementations import CODE_KERNELS, Implementations
from tgis.shard.kernels.cuda.products.codes import CudaCodeProduct, CudaJoinedProduct, pack_product
from tgis.shard.kernels.cuda.products.floats import CudaProduct, DeviceProduct
from tgis.shard.kernels.cuda.states import mix
from tgis.shard.kernels.portable.ops import TorchKernels, read_packed
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.layers.ops import Activation, LinearLayer, NormLayer, Product
from tgis.shard.layers.states import DeltaNet, Mamba2
from tgis.shard.memory.state_cache import StepStates
from tgis.shard.quant.interface import MatrixRole


class CudaKernels(TorchKernels):
    """`Kernels` of GPUs. Steps of a single rank without adapters and experts can be captured in a CUDA
    graph."""

    def __init__(self, device: torch.device, implementations: Implementations):
        super().__init__(device)
        self._implementations = implementations
        # A twin converts all weights to float32 in every step.
        is_slow = bool(CODE_KERNELS.intersection(implementations.replaced))
        self._keeps_codes = not is_slow or device.type != "cuda"
        self._dtype = torch.float32  # type of all weights, set when the first is packed

    def pack(self, weight: Stored, dtype: torch.dtype, role: MatrixRole = "linear") -> CudaProduct:
        self._dtype = dtype
        return CudaProduct(read_packed(weight, dtype, self.device), _is_wide(role, dtype))

    def find_code_packer(
        self, layout: CodeLayout, role: MatrixRole = "linear", dtype: torch.dtype = torch.bfloat16
    ) -> Callable[[Stored], Product] | None:
        return partial(self._pack_codes, dtype, role) if self._keeps_codes and can_pack(layout) else None

    def count_code_bytes(self, layout: CodeLayout) -> float:
        return count_bytes(layout)

    def _pack_codes(self, dtype: torch.dtype, role: MatrixRole, weight: Stored) -> Product:
        self._dtype = dtype
        return pack_product(self._implementations, weight, self.device, dtype, _is_wide(role, dtype))

    def join(self, products: Sequence[Product]) -> Product:
        return CudaJoinedProduct([each for each in products if isinstance(each, CudaCodeProduct)])

    def rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        return self._implementations.norm(x, delta, weight, None, eps, False, torch.float32)

    def layer_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        return self._implementations.norm(x, delta, weight, bias, eps, True, torch.float32)

    def activate(self, x: Tensor, name: str) -> Tensor:
        return x.copy_(self._implementations.gate(x.contiguous(), name, False))

    def multiply_gated(self, gate_up: Tensor, name: str) -> Tensor:
        return self._implementations.gate(gate_up, name, True)

    def mix_states(self, rows: Tensor, mixer: Mamba2, layer: int, states: StepStates) -> Tensor:
        return mix.mix_states(self._implementations, rows, mixer, layer, states)

    def mix_delta(
        self, rows: Tensor, gates: Tensor, mixer: DeltaNet, layer: int, states: StepStates
    ) -> Tensor:
        return mix.mix_delta(self._implementations, rows, gates, mixer, layer, states)

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
        """Implement `Kernels.norm_product`. The result has the weights' type."""
        y = self._multiply(self._normalise(x, delta, norm), linear, adapters)
        return y if then is None else self._implementations.gate(y, then.name, then.is_gated)

    def product_add(
        self, x: Tensor, y: Tensor, linear: LinearLayer, adapters: TokenAdapters | None
    ) -> Tensor:
        biased = linear.as_product(adapters)
        if biased is None or not isinstance(biased.product, DeviceProduct) or biased.product.is_wide:
            return linear(y, adapters)
        return biased.product.add_bias(y, biased.bias)

    def _normalise(self, x: Tensor, delta: Tensor | None, norm: NormLayer | None) -> Tensor:
        """Return norm(x + delta) in the weights' type. Overwrites x with the sum."""
        if norm is None:
            return (x if delta is None else self.add(x, delta)).to(self._dtype)
        return self._implementations.norm(
            x, delta, norm.weight, norm.bias, norm.eps, norm.is_centred, self._dtype
        )

    def _multiply(self, x: Tensor, linear: LinearLayer, adapters: TokenAdapters | None) -> Tensor:
        """Return the layer's output in the weights' type."""
        biased = linear.as_product(adapters)
        if biased is None or not isinstance(biased.product, DeviceProduct):
            return linear(x, adapters).to(self._dtype)
        return biased.product.add_bias(x, biased.bias).to(self._dtype)


def _is_wide(role: MatrixRole, dtype: torch.dtype) -> bool:
    """Return True if products return float32: those where rounding matters, and all with float16."""
    return role != "linear" or dtype == torch.float16
