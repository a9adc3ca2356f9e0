"""`Kernels` of the CPU: float32 activations, packed weights, and rows that do not affect each other."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.tensors import Stored
from tgis.shard.collectives import CPU
from tgis.shard.kernels.cpu import lora as lora_kernels
from tgis.shard.kernels.cpu.codes import product as code_product
from tgis.shard.kernels.cpu.codes.layout import Kind
from tgis.shard.kernels.cpu.codes.product import CodeProduct, JoinedProduct
from tgis.shard.kernels.cpu.codes.tile_kernels import CodeTileKernels
from tgis.shard.kernels.cpu.delta_net import launch as delta_net
from tgis.shard.kernels.cpu.gemm import product as gemm
from tgis.shard.kernels.cpu.int8 import product as int8
from tgis.shard.kernels.cpu.jit.compiler import Kernel, as_bits, empty
from tgis.shard.kernels.cpu.mamba import kernels as mamba_kernels
from tgis.shard.kernels.cpu.mamba import launch as mamba
from tgis.shard.kernels.cpu.pointwise import activations, elementwise, embedding, heads, norms
from tgis.shard.kernels.cpu.pointwise.position_factors import position_factors
from tgis.shard.kernels.cpu.rounding.rounder import CpuRounder
from tgis.shard.layers.lora import LORA_TILE, Deltas, TokenAdapters
from tgis.shard.layers.ops import CodeTable, HeadNorm, Product, Unfused
from tgis.shard.layers.states import DeltaNet, Mamba2
from tgis.shard.memory.state_cache import StepStates
from tgis.shard.quant.interface import MatrixRole
from tgis.shard.quant.schemes import int8 as int8_scheme

_UNIT = 16384  # minimum elements per thread; below, waking a thread costs more than it saves
_PRODUCTS = 1 << 17  # minimum multiplications of LoRA for several threads
_FEW_TILES, _COLUMNS = 8, 8192  # with at most 8 LoRA tiles, columns are split into slices of this width
_preparing = threading.Lock()


class CpuKernels(CpuRounder, Unfused):
    """`Kernels` by compiled kernels."""

    device = CPU

    def __init__(
        self,
        rounds_activations: bool = False,
        int8_kernel: Kernel | None = None,
        tile_kernels: Mapping[Kind, CodeTileKernels] = code_product.NO_KERNELS,
    ):
        """Set whether products with the head, and with integer codes if the processor has the instructions,
        round activations to 8 bits. `int8_kernel` replaces the default kernel of int8 products.
        `tile_kernels` are those of products with codes on AMX tiles."""
        self._rounds_activations = rounds_activations
        self._tile_kernels = tile_kernels
        self._pack_int8 = partial(int8.pack, kernel=int8_kernel)

    def pack(self, weight: Stored, dtype: torch.dtype, role: MatrixRole = "linear") -> Product:
        # A 16-bit head would take a quarter of the time of the layers.
        if role == "head" and self._rounds_activations:
            return self._pack_int8(int8_scheme.Rounded(weight, self))
        return gemm.pack(weight, dtype)

    def find_code_packer(
        self, layout: CodeLayout, role: MatrixRole = "linear", dtype: torch.dtype = torch.bfloat16
    ) -> Callable[[Stored], Product] | None:
        if layout == int8_scheme.LAYOUT:
            return self._pack_int8
        tile_kernels = code_product.NO_KERNELS if role == "replicated" else self._tile_kernels
        return code_product.find_packer(layout, self._rounds_activations, tile_kernels)

    def rounds_inputs(self, layout: CodeLayout) -> bool:
        if layout.rounds_activations:
            return True
        return self._rounds_activations and not layout.table and self.find_code_packer(layout) is not None

    def find_table_packer(self, layout: CodeLayout) -> Callable[[Stored], CodeTable] | None:
        return code_product.find_table_packer(layout, self._rounds_activations, self._tile_kernels)

    def join(self, products: Sequence[Product]) -> Product:
        return JoinedProduct([each for each in products if isinstance(each, CodeProduct)])

    def prepare_adapters(self) -> None:
        """Compile the LoRA kernel unless its machine code is cached. Thread-safe."""
        with _preparing:
            lora_kernels.add_low_rank(*[0] * 14)

    def add_low_rank(self, y: Tensor, x: Tensor, deltas: Deltas, adapters: TokenAdapters) -> None:
        assert x.is_contiguous()
        _add_low_rank(y, x.shape[1], x.data_ptr(), 0, deltas, adapters)

    def add_looked_up(self, y: Tensor, token_ids: Tensor, deltas: Deltas, adapters: TokenAdapters) -> None:
        _add_low_rank(y, 0, 0, token_ids.data_ptr(), deltas, adapters)

    def rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, delta, weight, eps, empty(*x.shape))

    def layer_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        return layer_norm(x, delta, weight, bias, eps, empty(*x.shape))

    def look_up(self, table: Tensor, ids: Tensor, offset: int = 0) -> Tensor:
        out = empty(len(ids), table.shape[1])
        addresses = (ids.data_ptr(), table.data_ptr(), out.data_ptr())
        _run(embedding.LOOK_UP[table.dtype], out.shape, *addresses, offset)
        return out

    def select_ids(self, ids: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
        count = len(ids)
        # Kernel graphs have float32 memory only.
        local = empty(count, 2).view(torch.int64).view(count)
        is_inside = empty(count)
        embedding.select_ids(count, begin, end, ids.data_ptr(), local.data_ptr(), is_inside.data_ptr())
        return local, is_inside

    def clear_rows(self, x: Tensor, is_kept: Tensor) -> Tensor:
        embedding.clear_rows(*x.shape, x.data_ptr(), is_kept.data_ptr())
        return x

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return _change(x, "add", other=y.data_ptr(), stride=y.stride(0) if y.dim() > 1 else 0)

    def multiply_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        return _change(x, "multiply_sigmoid", other=gate.data_ptr(), stride=gate.stride(0))

    def concatenate(self, x: Tensor, y: Tensor) -> Tensor:
        width = x.shape[1]
        out = empty(len(x), width + y.shape[1])
        _change(out[:, :width], "copy", other=x.data_ptr(), stride=x.stride(0))
        _change(out[:, width:], "copy", other=y.data_ptr(), stride=y.stride(0))
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return _change(x, "scale", factor)

    def clamp(self, x: Tensor, limit: float) -> Tensor:
        return _change(x, "clamp", limit)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return _change(x, "soft_cap", cap)

    def position_factors(self, positions: Tensor, beta: float, length: int, shift: int) -> Tensor:
        out = empty(len(positions))
        numbers = (as_bits(beta), length, shift)
        position_factors(len(positions), *numbers, positions.data_ptr(), out.data_ptr())
        return out

    def scale_rows(self, x: Tensor, factors: Tensor) -> Tensor:
        return _change(x, "scale_rows", other=factors.data_ptr(), stride=1)

    def activate(self, x: Tensor, name: str) -> Tensor:
        _run(activations.activate, x.shape, activations.KINDS[name], x.data_ptr())
        return x

    def multiply_gated(self, gate_up: Tensor, name: str) -> Tensor:
        num_tokens, width = gate_up.shape
        out = empty(num_tokens, width // 2)
        kind = activations.GATED_KINDS[name]
        _run(activations.multiply_gated, out.shape, kind, gate_up.data_ptr(), out.data_ptr())
        return out

    def mix_states(self, rows: Tensor, mixer: Mamba2, layer: int, states: StepStates) -> Tensor:
        return mamba.mix_states(rows, mixer, layer, states)

    def gate_norm(self, x: Tensor, rows: Tensor, mixer: Mamba2) -> Tensor:
        gating = mamba_kernels.GATINGS[mixer.gating]
        sizes = (mixer.sizes.num_groups, rows.shape[1], as_bits(mixer.eps), gating)
        addresses = (rows.data_ptr(), mixer.norm_weight.data_ptr(), x.data_ptr())
        _run(mamba_kernels.gate_norm, x.shape, *sizes, *addresses)
        return x

    def mix_delta(
        self, rows: Tensor, gates: Tensor, mixer: DeltaNet, layer: int, states: StepStates
    ) -> Tensor:
        return delta_net.mix_delta(rows, gates, mixer, layer, states)

    def angles(
        self,
        positions: Tensor,
        inv_freq: Tensor,
        amplitudes: Tensor,
        factor_sets: Tensor | None = None,
        growth: Tensor | None = None,
    ) -> Tensor:
        num_sets, half = inv_freq.shape
        out = empty(2, len(positions), half)
        addresses = (positions.data_ptr(), inv_freq.data_ptr(), amplitudes.data_ptr())
        optional = (_address(factor_sets), _address(growth))
        heads.angles(len(positions), half, num_sets, *addresses, *optional, out.data_ptr())
        return out


CPU_KERNELS = CpuKernels()


def rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """Write the result of `Kernels.rms_norm` to out, float32 or bfloat16, and return it."""
    addresses = (x.data_ptr(), _address(delta), weight.data_ptr(), out.data_ptr())
    _run(norms.RMS_NORM[out.dtype], x.shape, *addresses, as_bits(eps))
    return out


def layer_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor
) -> Tensor:
    """Write the result of `Kernels.layer_norm` to out, float32 or bfloat16, and return it."""
    addresses = (x.data_ptr(), _address(delta), weight.data_ptr(), _address(bias), out.data_ptr())
    _run(norms.LAYER_NORM[out.dtype], x.shape, *addresses, as_bits(eps))
    return out


def split_heads(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    angles: Tensor | None,
    head_norm: HeadNorm | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv into q, k, v of [num_tokens, heads, head_dim]. See `Attention.run`."""
    num_tokens, width = qkv.shape
    head_dim = width // (num_heads + 2 * num_kv_heads)
    q = empty(num_tokens, num_heads, head_dim)
    k, v = (empty(num_tokens, num_kv_heads, head_dim) for _ in range(2))
    outputs = (q.data_ptr(), k.data_ptr(), v.data_ptr())
    addresses = (qkv.data_ptr(), qkv.stride(0), _address(angles), *outputs)
    shape = (num_tokens, num_heads, num_kv_heads, head_dim, 0 if angles is None else angles.shape[-1])
    norm = (0, 0, 0, 0)
    assert qkv.stride(1) == 1, "channels of a row are contiguous"
    if head_norm:
        weights = (head_norm.q_weight.data_ptr(), head_norm.k_weight.data_ptr(), _address(head_norm.v_weight))
        norm = (*weights, as_bits(head_norm.eps))
    _run(heads.split_heads, shape, *addresses, *norm, width=width)
    return q, k, v


def _add_low_rank(
    y: Tensor, in_features: int, x: int, token_ids: int, deltas: Deltas, adapters: TokenAdapters
) -> None:
    assert y.is_contiguous()
    tiles = adapters.tiles
    order = adapters.order
    out_features = y.shape[1]
    num_tiles, num_tokens = len(tiles), len(order)
    # Each slice of columns recomputes x a, so columns are sliced only if there are few tiles.
    num_slices = 1 if num_tiles > _FEW_TILES else -(-out_features // _COLUMNS)
    sizes = (num_tiles, num_slices, _COLUMNS if num_slices > 1 else out_features, min(num_tokens, LORA_TILE))
    products = num_tokens * deltas.max_rank * (in_features + out_features)
    is_small = num_tiles * num_slices < 2 or products < _PRODUCTS
    run = lora_kernels.add_low_rank if is_small else lora_kernels.add_low_rank.parallel
    operands = (in_features, out_features, x, y.data_ptr(), token_ids)
    tables = (order.data_ptr(), tiles.data_ptr(), deltas.bounds.data_ptr(), deltas.table.data_ptr())
    run(*sizes, deltas.max_rank, *operands, *tables)


def _change(x: Tensor, kind: str, number: float = 0.0, other: int = 0, stride: int = 0) -> Tensor:
    assert x.stride(1) == 1 or x.shape[1] == 1, "elements of a row are contiguous"
    operands = (elementwise.KINDS[kind], x.data_ptr(), x.stride(0), other, stride, as_bits(number))
    _run(elementwise.change, x.shape, *operands)
    return x


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _run(kernel: Kernel, shape: tuple[int, ...], *args: int, width: int | None = None) -> None:
    """Run a kernel over shape[0] rows of `width` (default: shape[1]) elements, on all threads if that is
    faster."""
    rows_per_unit = max(1, _UNIT // (width or shape[1]))
    run = kernel if shape[0] <= rows_per_unit else kernel.parallel
    run(*shape, rows_per_unit, *args)
