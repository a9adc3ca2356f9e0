"""The CPU's `Kernels`: float32 activations, and weights packed once for products whose rows are independent.

float16 and bfloat16 weights are packed as float16 (FBGEMM), float32 ones as float32 (oneDNN). Both keep a
row's bits whatever the other rows are, if some numbers of rows are avoided, which `_extra_rows` finds out."""

import functools
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tgis.shard.compiled import Kernel, as_bits, empty
from tgis.shard.layers import (
    compiled_activations,
    compiled_changes,
    compiled_heads,
    compiled_low_rank,
    compiled_norms,
    compiled_tables,
)
from tgis.shard.layers.kernels import HeadNorm, Product
from tgis.shard.lora import TILE, Deltas, TokenAdapters

logger = logging.getLogger(__name__)

device = torch.device("cpu")
FLOAT16_MAX = 65504.0
_UNIT = 16384  # elements a thread should get at least; waking one for less costs more than it saves
_PRODUCTS = 1 << 17  # multiplications for which a second thread is woken
_FEW_TILES, _COLUMNS = 8, 8192  # so few tiles of adapters' tokens are cut into so many columns
_PERIOD = 120  # rows that FBGEMM takes at a time
_TRIED_FEATURES = 32
_preparing = threading.Lock()


def pack(weight: Tensor, dtype: torch.dtype, label: str) -> Product:
    """As in `Kernels`. A matrix with values beyond float16's range stays float32, with a warning."""
    low, high = weight.aminmax()
    if dtype != torch.float32 and not max(-low, high) <= FLOAT16_MAX:
        logger.warning("%s does not fit float16 and is kept as float32", label)
        dtype = torch.float32
    halves = dtype != torch.float32 and "fbgemm" in torch.backends.quantized.supported_engines
    return _padded(_pack_float16 if halves else _pack_float32, weight.to(dtype).float())


def prepare_adapters() -> None:
    """Compiles, where that has not been done on this machine; from any thread."""
    with _preparing:
        compiled_low_rank.add_low_rank(*[0] * 14)


def add_low_rank(y: Tensor, x: Tensor, deltas: Deltas, adapters: TokenAdapters) -> None:
    assert x.is_contiguous()
    _add_low_rank(y, x.shape[1], x.data_ptr(), 0, deltas, adapters)


def add_looked_up(y: Tensor, token_ids: Tensor, deltas: Deltas, adapters: TokenAdapters) -> None:
    _add_low_rank(y, 0, 0, token_ids.data_ptr(), deltas, adapters)


def _add_low_rank(
    y: Tensor, in_features: int, x: int, token_ids: int, deltas: Deltas, adapters: TokenAdapters
) -> None:
    assert y.is_contiguous()
    tiles, order, out_features = adapters.tiles, adapters.order, y.shape[1]
    num_tiles, num_tokens = len(tiles), len(order)
    # Every slice of the columns needs all of x a, so there are several only where tiles are few.
    num_slices = 1 if num_tiles > _FEW_TILES else -(-out_features // _COLUMNS)
    sizes = (num_tiles, num_slices, _COLUMNS if num_slices > 1 else out_features, min(num_tokens, TILE))
    products = num_tokens * deltas.max_rank * (in_features + out_features)
    is_small = num_tiles * num_slices < 2 or products < _PRODUCTS
    run = compiled_low_rank.add_low_rank if is_small else compiled_low_rank.add_low_rank.spread
    given = (in_features, out_features, x, y.data_ptr(), token_ids)
    tables = (order.data_ptr(), tiles.data_ptr(), deltas.bounds.data_ptr(), deltas.table.data_ptr())
    run(*sizes, deltas.max_rank, *given, *tables)


def rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    out = empty(*x.shape)
    addresses = (x.data_ptr(), _address(delta), weight.data_ptr(), out.data_ptr())
    _run(compiled_norms.rms_norm, x.shape, *addresses, as_bits(eps))
    return out


def layer_norm(x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    out = empty(*x.shape)
    addresses = (x.data_ptr(), _address(delta), weight.data_ptr(), _address(bias), out.data_ptr())
    _run(compiled_norms.layer_norm, x.shape, *addresses, as_bits(eps))
    return out


def look_up(table: Tensor, ids: Tensor, offset: int = 0) -> Tensor:
    out = empty(len(ids), table.shape[1])
    addresses = (ids.data_ptr(), table.data_ptr(), out.data_ptr())
    _run(compiled_tables.LOOK_UP[table.dtype], out.shape, *addresses, offset)
    return out


def add(x: Tensor, y: Tensor) -> Tensor:
    return _change(x, "add", other=y.data_ptr(), stride=y.stride(0) if y.dim() > 1 else 0)


def scale(x: Tensor, factor: float) -> Tensor:
    return _change(x, "scale", factor)


def clamp(x: Tensor, limit: float) -> Tensor:
    return _change(x, "clamp", limit)


def soften(x: Tensor, cap: float) -> Tensor:
    return _change(x, "soften", cap)


def _change(x: Tensor, kind: str, number: float = 0.0, other: int = 0, stride: int = 0) -> Tensor:
    given = (compiled_changes.KINDS[kind], x.data_ptr(), other, stride, as_bits(number))
    _run(compiled_changes.change, x.shape, *given)
    return x


def activate(x: Tensor, name: str) -> Tensor:
    _run(compiled_activations.activate, x.shape, compiled_activations.KINDS[name], x.data_ptr())
    return x


def multiply_gated(gate_up: Tensor, name: str) -> Tensor:
    num_tokens, width = gate_up.shape
    out = empty(num_tokens, width // 2)
    kind = compiled_activations.KINDS[name]
    _run(compiled_activations.multiply_gated, out.shape, kind, gate_up.data_ptr(), out.data_ptr())
    return out


def angles(
    positions: Tensor,
    inv_freq: Tensor,
    amplitudes: Tensor,
    regimes: Tensor | None = None,
    growth: Tensor | None = None,
) -> Tensor:
    num_regimes, half = inv_freq.shape
    out = empty(2, len(positions), half)
    addresses = (positions.data_ptr(), inv_freq.data_ptr(), amplitudes.data_ptr())
    optional = (_address(regimes), _address(growth))
    compiled_heads.angles(len(positions), half, num_regimes, *addresses, *optional, out.data_ptr())
    return out


def split_heads(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    angles: Tensor | None,
    head_norm: HeadNorm | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, width = qkv.shape
    head_dim = width // (num_heads + 2 * num_kv_heads)
    q = empty(num_tokens, num_heads, head_dim)
    k, v = (empty(num_tokens, num_kv_heads, head_dim) for _ in range(2))
    addresses = (qkv.data_ptr(), _address(angles), q.data_ptr(), k.data_ptr(), v.data_ptr())
    shape = (num_tokens, num_heads, num_kv_heads, head_dim, 0 if angles is None else angles.shape[-1])
    norm = (0, 0, 0)
    if head_norm:
        weights = (head_norm.q_weight.data_ptr(), head_norm.k_weight.data_ptr())
        norm = (*weights, as_bits(head_norm.eps))
    _run(compiled_heads.split_heads, shape, *addresses, *norm, width=width)
    return q, k, v


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _run(kernel: Kernel, shape: tuple[int, ...], *args: int, width: int | None = None) -> None:
    """Runs a kernel over shape[0] rows of `width` elements, else shape[1], on all threads where it pays."""
    rows_per_unit = max(1, _UNIT // (width or shape[1]))
    run = kernel if shape[0] <= rows_per_unit else kernel.spread
    run(*shape, rows_per_unit, *args)


def _pack_float32(weight: Tensor) -> Product:
    if not torch._C._has_mkldnn:
        weight = weight.clone()
        return lambda x: nn.functional.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, packed, None, "none", [], "")


class _Float16(nn.Module):
    def __init__(self, packed: torch.ScriptObject):
        super().__init__()
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        return y


def _pack_float16(weight: Tensor) -> Product:
    """Scripted, because a packed weight that comes from Python costs ten microseconds with every call."""
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(_Float16(packed))
    product: Product = scripted._c._get_method("forward")
    return product


def _padded(packer: Callable[[Tensor], Product], weight: Tensor) -> Product:
    """The packed weight, only ever given so many rows at a time that each row's bits are its own affair."""
    product, extra = packer(weight), _extra_rows(packer, weight.shape[1])
    if not any(extra):
        return product

    def multiply(x: Tensor) -> Tensor:
        missing = extra[len(x) % _PERIOD]
        return product(torch.cat((x, x[:1].expand(missing, -1))))[: len(x)] if missing else product(x)

    return multiply


@functools.cache
def _extra_rows(packer: Callable[[Tensor], Product], in_features: int) -> tuple[int, ...]:
    """How many rows to add for every number of rows, modulo _PERIOD, found by trying on this machine.

    Libraries cut rows into groups and sum in another order where a group is small: FBGEMM on AVX2 where
    groups of six leave one or two rows over, oneDNN where there is but one row."""
    random = torch.Generator().manual_seed(0)
    product = packer(torch.randn(_TRIED_FEATURES, in_features, generator=random))
    x = torch.randn(_PERIOD, in_features, generator=random)
    with _one_thread():
        expected = product(x)
        good = [True] + [torch.equal(product(x[:m]), expected[:m]) for m in range(1, _PERIOD)]
    if sum(good) < _PERIOD / 2:
        logger.warning("the rows of matrix products affect each other's last bits on this machine")
        return (0,) * _PERIOD
    return tuple(next(i for i in range(_PERIOD) if good[(m + i) % _PERIOD]) for m in range(_PERIOD))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Many small products are slow where threads wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
