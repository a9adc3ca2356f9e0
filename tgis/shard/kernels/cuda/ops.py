"""`Kernels` of GPUs: norms and activations of this package, and products of cuBLAS.

The residual stream, logits and "replicated" products are float32. Other activations have the weights' type,
except that branches of float16 models return float32, because some exceed the range of float16."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.tensors import Stored
from tgis.shard.kernels.cuda.attention import CudaAttention
from tgis.shard.kernels.cuda.codes.packing import can_pack, count_bytes
from tgis.shard.kernels.cuda.grouped.expert_table import ExpertMatrices, ExpertTable
from tgis.shard.kernels.cuda.grouped.slots import SlotDeltas, SlotTokens
from tgis.shard.kernels.cuda.implementations import CODE_KERNELS, Implementations
from tgis.shard.kernels.cuda.products.choice import ProductChoices
from tgis.shard.kernels.cuda.products.codes import CudaCodeProduct, CudaJoinedProduct, pack_product
from tgis.shard.kernels.cuda.products.floats import CudaProduct, DeviceProduct
from tgis.shard.kernels.cuda.products.stored_choices import NOT_STORED, StoredChoices
from tgis.shard.kernels.cuda.products.timing import Timer
from tgis.shard.kernels.cuda.states import mix
from tgis.shard.kernels.portable.ops import TorchKernels, read_packed
from tgis.shard.layers.lora import Deltas, LowRank, TokenAdapters
from tgis.shard.layers.ops import Activation, ExpertProducts, LinearLayer, MixExperts, NormLayer, Product
from tgis.shard.layers.states import DeltaNet, Mamba2
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.memory.state_cache import StepStates
from tgis.shard.quant.interface import MatrixRole


class CudaKernels(TorchKernels):
    """`Kernels` of GPUs. Steps can be captured in a CUDA graph, unless experts have codes or adapters of
    their own."""

    def __init__(self, device: torch.device, implementations: Implementations, uses_few: bool = False):
        """Create the kernels. `uses_few` is the choice of `multiply_few` before it is measured."""
        super().__init__(device)
        self._implementations = implementations
        self._choices = ProductChoices(implementations.multiply_few, uses_few)
        # A twin converts all weights to float32 in every step.
        is_slow = bool(CODE_KERNELS.intersection(implementations.replaced))
        self._keeps_codes = not is_slow or device.type != "cuda"
        self._dtype = torch.float32  # type of all weights, set when the first is packed

    def open_attention(self, cache: KVCache, group_size: int) -> CudaAttention:
        return CudaAttention(cache, self._implementations, group_size)

    def pack(self, weight: Stored, dtype: torch.dtype, role: MatrixRole = "linear") -> CudaProduct:
        self._dtype = dtype
        matrix = read_packed(weight, dtype, self.device)
        is_wide = _is_wide(role, dtype)
        return CudaProduct(matrix, is_wide, self._choices.add(matrix, is_wide))

    def choose_products(
        self, timer: Timer, agree: Callable[[int], int], stored_in: Path | None = None
    ) -> None:
        """Time the products of few rows with the matrices that were packed, and use the faster ones, or those
        that were chosen before a restart and are stored in a file. `agree` returns the smallest of the ranks'
        values. A rank whose `multiply_few` is replaced takes part, because the others wait for it."""
        if "multiply_few" in self._implementations.replaced:
            self._choices.measure(_refuse_timing, agree, NOT_STORED)
        else:
            self._choices.measure(timer, agree, StoredChoices(stored_in))

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

    def place_low_rank(self, update: LowRank, is_table: bool) -> LowRank:
        """Implement `Kernels.place_low_rank`. The columns of a, which a product reads, are contiguous."""
        a, b = update.a.to(self.device), update.b.to(self.device)
        return LowRank(a if is_table else a.t().contiguous().t(), b, update.first)

    def add_low_rank(self, y: Tensor, x: Tensor, deltas: Deltas, adapters: TokenAdapters) -> None:
        if isinstance(deltas, SlotDeltas) and isinstance(adapters, SlotTokens):
            tokens = adapters.row_tiles, adapters.indices, adapters.max_rank
            self._implementations.add_low_rank(y, x.contiguous(), deltas, *tokens)
        else:
            super().add_low_rank(y, x, deltas, adapters)

    def add_looked_up(self, y: Tensor, token_ids: Tensor, deltas: Deltas, adapters: TokenAdapters) -> None:
        if isinstance(deltas, SlotDeltas):
            self.add_low_rank(y, token_ids, deltas, adapters)
        else:
            super().add_looked_up(y, token_ids, deltas, adapters)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Implement `Kernels.add`. Either may also be what `product_add` returns; if x is, the sum is new."""
        return super().add(self._whole(x), self._whole(y))

    def rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        types = torch.float32, self._branch_dtype
        return self._implementations.norm(x, delta, weight, None, eps, False, *types)

    def layer_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        types = torch.float32, self._branch_dtype
        return self._implementations.norm(x, delta, weight, bias, eps, True, *types)

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

    def join_experts(
        self,
        experts: Sequence[ExpertProducts],
        activation: Activation,
        gate_scale: float,
        scales_input: bool,
    ) -> MixExperts | None:
        products = [product for expert in experts for product in (expert.up.product, expert.down.product)]
        of_floats = [product for product in products if isinstance(product, CudaProduct)]
        weights = [product.weight for product in of_floats]
        if len(weights) < len(products) or len({weight.dtype for weight in weights}) > 1:
            return None
        for product in of_floats:
            product.leave_to_library()
        matrices = [
            ExpertMatrices(up, expert.up.bias, down, expert.down.bias)
            for expert, up, down in zip(experts, weights[::2], weights[1::2], strict=True)
        ]
        table = ExpertTable.of(matrices, activation, gate_scale, scales_input)
        mix = self._implementations.mix_experts

        def mix_experts(x: Tensor, factors: Tensor, chosen: Tensor) -> Tensor:
            return mix(x, factors, chosen, table, table.choose_tile(chosen.numel()))

        return mix_experts

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
        """Implement `Kernels.product_add`. The result may be the parts of the sum, [num_parts, num_tokens,
        size], which the next norm adds."""
        biased = linear.as_product(adapters)
        if biased is not None and biased.bias is None and isinstance(biased.product, CudaProduct):
            parts = biased.product.multiply_parts(y)
            if parts is not None:
                return parts
        biased = linear.as_product(None)
        if biased is None or not isinstance(biased.product, DeviceProduct) or biased.product.is_wide:
            return linear(y, adapters)
        return linear.adapt(y, biased.product.add_bias(y, biased.bias), adapters)

    def _whole(self, x: Tensor) -> Tensor:
        """Return the sum of the parts that `product_add` may return."""
        return self._implementations.add_parts(x, None, self._branch_dtype) if x.dim() == 3 else x

    @property
    def _branch_dtype(self) -> torch.dtype:
        """Type to which a branch's output is rounded."""
        return torch.float32 if _is_wide("linear", self._dtype) else self._dtype

    def _normalise(self, x: Tensor, delta: Tensor | None, norm: NormLayer | None) -> Tensor:
        """Return norm(x + delta) in the weights' type. Overwrites x with the sum."""
        if norm is None:
            return (x if delta is None else self.add(x, delta)).to(self._dtype)
        return self._implementations.norm(
            x,
            delta,
            norm.weight,
            norm.bias,
            norm.eps,
            norm.is_centred,
            self._dtype,
            self._branch_dtype,
        )

    def _multiply(self, x: Tensor, linear: LinearLayer, adapters: TokenAdapters | None) -> Tensor:
        """Return the layer's output in the weights' type. The adapters' updates come after the bias, so that
        rows without adapters have the same bits beside rows with adapters as without."""
        biased = linear.as_product(None)
        if biased is None or not isinstance(biased.product, DeviceProduct):
            return linear(x, adapters).to(self._dtype)
        y = biased.product.add_bias(x, biased.bias)
        return linear.adapt(x, y, adapters).to(self._dtype)


def _refuse_timing(_: Callable[[], None]) -> float:
    raise RuntimeError("multiply_few is replaced")


def _is_wide(role: MatrixRole, dtype: torch.dtype) -> bool:
    """Return True if products return float32: those where rounding matters, and all with float16."""
    return role != "linear" or dtype == torch.float16
