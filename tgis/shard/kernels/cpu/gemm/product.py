"""Matrix product of float32 rows with a weight packed in panels, and the kernels that compute it for any
number of rows. Threads share the work in units of some rows and panels."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from tgis.shard.checkpoint.tensors import Stored, read_pieces
from tgis.shard.kernels.cpu.gemm.inner_loop import (
    BLOCK,
    MANY_ROWS,
    ROWS,
    STRIDE,
    copy,
    copy_columns,
    multiply_tall_tile,
    multiply_tile,
    widen,
)
from tgis.shard.kernels.cpu.gemm.pack import PACK
from tgis.shard.kernels.cpu.gemm.panels import PANEL, arena, count_panels
from tgis.shard.kernels.cpu.jit.compiler import Kernel, empty, keep_alive, next_unit, reorderable

logger = logging.getLogger(__name__)

# Bounds on a matrix's largest magnitude within which float16 keeps it well. Above, values become infinite;
# below, many values are subnormal and lose digits.
FLOAT16_MAX, FLOAT16_SMALL = 65504.0, 2.0**-10
_PIECE = 1 << 20  # approximate number of elements that are read, converted and packed at a time
_MIN_PARALLEL = 1 << 16  # with fewer multiplications, waking a second thread does not pay
_MAX_PANELS = 8  # of a unit
# Most rows and panels of a unit of at least MANY_ROWS rows. Its sums and a block of its x fit a second-level
# cache together.
_MAX_WIDENED_ROWS, _MAX_WIDENED_PANELS = 32 * ROWS, 4
_LINE = 64  # bytes of a cache line
_ALIGNED = 16  # columns that a block's size is a multiple of, as BLOCK is


class Kind(NamedTuple):
    """Kind of panels, constant in each kernel. Types are given as numbers of those types."""

    width: int  # bytes of a row of a panel
    element: Any  # type of weights
    factor: Any  # type of x
    columns: int = 1  # columns of x that a row of a panel is multiplied with
    is_widened: bool = True  # many rows are multiplied with weights that were converted to the type of x


_F32 = np.float32(0)
_FLOAT32 = Kind(width=4 * PANEL, element=_F32, factor=_F32)
_FLOAT16 = Kind(width=2 * PANEL, element=np.int16(0), factor=_F32)
_BFLOAT16 = Kind(width=2 * PANEL, element=np.uint16(0), factor=_F32)


@dataclass(frozen=True, eq=False)
class PackedProduct:
    """Product x W^T, float32 [num_tokens, in_features] -> [num_tokens, out_features]. Each element is one sum
    in the order of x's columns, so its bits do not depend on the other rows."""

    panels: Tensor  # uint8 memory of panels of the kind that `kernel` reads
    in_features: int
    out_features: int
    kernel: Kernel

    def __call__(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        assert x.dtype == torch.float32
        assert x.shape[1] == self.in_features
        num_rows = len(x)
        y = empty(num_rows, self.out_features)
        if num_rows:
            is_small = num_rows * self.in_features * self.out_features < _MIN_PARALLEL
            run = self.kernel if is_small else self.kernel.parallel
            sizes = (num_rows, self.out_features, self.in_features, torch.get_num_threads())
            run(*sizes, x.data_ptr(), self.panels.data_ptr(), y.data_ptr())
        return y


def pack(weight: Stored, dtype: torch.dtype) -> PackedProduct:
    """Implement `Kernels.pack`. A matrix that does not fit float16 stays float32, with a warning."""
    largest = torch.tensor(0.0)  # NaN if a weight is

    def convert(piece: Tensor) -> Tensor:
        nonlocal largest
        if dtype == torch.float16 and piece.dtype != torch.float16:
            largest = largest.maximum(torch.stack(piece.aminmax()).abs().amax())
        return piece.to(dtype)

    product = pack_elements(weight, convert, weight.shape[1] * dtype.itemsize, _MULTIPLY[dtype])
    if not (largest == 0 or FLOAT16_SMALL <= largest <= FLOAT16_MAX):
        logger.warning("%s does not fit float16 and is kept as float32", weight.label)
        return pack(weight, torch.float32)
    return product


def pack_elements(
    weight: Stored, convert: Callable[[Tensor], Tensor], row_bytes: int, kernel: Kernel
) -> PackedProduct:
    """Pack a weight for a kernel. `convert` turns some of its rows into rows of elements of panels, of
    `row_bytes` bytes each."""
    out_features, in_features = weight.shape
    size = row_bytes * PANEL  # bytes of a panel
    panels = arena.allocate(count_panels(out_features) * size)
    for rows, piece in read_pieces(weight, _PIECE, PANEL):
        elements, to = convert(piece), panels[rows.start // PANEL * size :]
        PACK[elements.itemsize].parallel(*elements.shape, elements.data_ptr(), to.data_ptr())
    return PackedProduct(panels, in_features, out_features, kernel)


class _TileRows(NamedTuple):
    """Rows of x in the layout that tiles read: blocks of columns, whose rows are STRIDE bytes apart."""

    address: Any
    block: int  # bytes of a block
    columns: int  # of a block


@reorderable
def _divide(k: int) -> int:
    """Return the columns of a block. Blocks are of about equal size, because each of them prefetches as much
    as it reads, and begin at a cache line."""
    num_blocks = -(-k // BLOCK)
    return -(-k // (num_blocks * _ALIGNED)) * _ALIGNED


@reorderable
def _copy_rows(x: int, first: int, rows: int, k: int, to: Any, kind: Any) -> None:
    """Copy rows of x, [m, k] at an address, from `first` on, to blocks [rows, STRIDE bytes] of the type of
    `kind.factor`."""
    width = to.columns * kind.columns
    for r in range(rows):
        for begin in range(0, k, width):
            place, count = to.address + begin // width * to.block + r * STRIDE, min(width, k - begin)
            copy_columns(place, x + 4 * ((first + r) * k + begin), count, kind.factor)


@reorderable
def _multiply_panel(
    out: int, stride: int, x: Any, rows: int, k: int, panel: int, ahead: int, kind: Any
) -> None:
    """Compute out[rows, PANEL] = x @ one panel of k rows. Rows of out are `stride` bytes apart. `ahead` is
    the address of the next panel."""
    width, columns = kind.width, x.columns
    num_tiles = -(-rows // ROWS)
    for begin in range(0, k, columns):
        count = min(columns, k - begin)
        source, weights = x.address + begin // columns * x.block, panel + begin * width
        following = weights + columns * width if begin + columns < k else ahead
        for tile in range(num_tiles):
            first = tile * rows // num_tiles
            tall = (tile + 1) * rows // num_tiles - first
            to, at = out + first * stride, source + first * STRIDE
            multiply_tile(
                tall, to, stride, to, stride, at, weights, following, width, count, begin == 0, kind.element
            )


@reorderable
def _copy_sums(sums: int, rows: int, y: int, n: int, panel: int) -> None:
    """Copy sums of the last panel, [rows, PANEL] at an address, to the columns that y has of it."""
    for r in range(rows):
        copy(y + 4 * (r * n + panel * PANEL), sums + 4 * PANEL * r, 4 * (n - panel * PANEL))


class _Sums(NamedTuple):
    """Sums of rows with a panel, [rows, PANEL] of float32."""

    address: Any
    stride: Any  # bytes from one row to the next


@reorderable
def _multiply_widened_block(
    sums: Any, out: Any, x: int, rows: int, weights: int, count: int, is_first: bool, ahead: int, kind: Any
) -> None:
    """Compute out[rows, PANEL] = sums + x @ a block of widened weights. Prefetch a block from `ahead`."""
    num_tiles = -(-rows // ROWS)
    step = -(-kind.width // num_tiles)
    for tile in range(num_tiles):
        first = tile * rows // num_tiles
        tall = (tile + 1) * rows // num_tiles - first
        part = ahead + tile * count * step
        source, to = sums.address + first * sums.stride, out.address + first * out.stride
        at, strides = x + first * STRIDE, (sums.stride, out.stride)
        multiply_tall_tile(
            tall, source, strides[0], to, strides[1], at, weights, part, step, count, is_first, kind.factor
        )


@reorderable
def _multiply_widened(
    y: int, n: int, x: Any, rows: int, k: int, weights: int, bounds: Any, sums: int, kind: Any
) -> None:
    """Multiply with some panels by blocks. `sums` is scratch memory for sums of [panels, rows, PANEL] and a
    widened block. The last block's sums are written to y."""
    width, columns = kind.width, x.columns
    first, end = bounds
    wide = sums + 4 * PANEL * rows * (end - first)
    for begin in range(0, k, columns):
        count, source = min(columns, k - begin), x.address + begin // columns * x.block
        for p in range(first, end):
            block = weights + (p * k + begin) * width
            ahead = block + k * width
            if p + 1 == end and begin + columns < k:
                ahead = weights + (first * k + begin + columns) * width
            if kind.is_widened:
                widen(wide, block, count, kind.element)
                block = wide
            kept = _Sums(sums + 4 * PANEL * (p - first) * rows, 4 * PANEL)
            is_last = begin + columns >= k and (p + 1) * PANEL <= n
            out = _Sums(y + 4 * PANEL * p, 4 * n) if is_last else kept
            _multiply_widened_block(kept, out, source, rows, block, count, begin == 0, ahead, kind)
    if end * PANEL > n:
        _copy_sums(sums + 4 * PANEL * (end - 1 - first) * rows, rows, y, n, end - 1)


@reorderable
def _multiply_panels(
    y: int, n: int, x: Any, rows: int, k: int, weights: int, bounds: Any, sums: int, kind: Any
) -> None:
    """Multiply with some panels without converting them to float32 first. `sums` is scratch memory. `bounds`
    are the first panel, the one after the last, and the one that the thread reads next."""
    begin, end, following = bounds
    for p in range(begin, end):
        next_p = p + 1 if p + 1 < end else following
        panel, ahead = weights + p * k * kind.width, weights + next_p * k * kind.width
        to, stride = y + 4 * p * PANEL, 4 * n
        is_whole = (p + 1) * PANEL <= n
        if not is_whole:
            to, stride = sums, 4 * PANEL
        _multiply_panel(to, stride, x, rows, k, panel, ahead, kind)
        if not is_whole:
            _copy_sums(sums, rows, y, n, p)


@reorderable
def multiply(args: Any, kind: Any) -> None:
    """Compute a matrix product. Units are numbered row group by row group, so that a thread can reuse its
    copy of x for its next units."""
    a = carray(args, 8)
    m, n, in_features, threads, x, weights, y = a[1], a[2], a[3], a[4], a[5], a[6], a[7]
    k, is_copied = -(-in_features // kind.columns), m > 1 or kind.columns > 1
    columns, num_panels = _divide(k), -(-n // PANEL)
    num_blocks = -(-k // columns)
    is_widened = m >= MANY_ROWS
    max_rows = _MAX_WIDENED_ROWS if is_widened else MANY_ROWS
    groups = -(-m // max_rows)
    max_rows = -(-m // groups)
    max_panels = _MAX_WIDENED_PANELS if is_widened else _MAX_PANELS
    unit_panels = max(1, min(max_panels, num_panels * groups // (8 * threads)))
    group_units = -(-num_panels // unit_panels)
    rows_of_x = np.empty(max_rows * num_blocks * STRIDE // 4 if is_copied else 1, np.float32)
    scratch = np.empty(((max_rows * unit_panels + BLOCK if is_widened else max_rows) + 1) * PANEL, np.float32)
    copied: Any = np.int64(rows_of_x.ctypes.data)
    sums: Any = (np.int64(scratch.ctypes.data) + _LINE - 1) // _LINE * _LINE
    source = _TileRows(x, 4 * columns, columns)
    copied_group = -1
    unit = next_unit(args)
    while unit < groups * group_units:
        following = next_unit(args)
        group, begin = unit // group_units, unit % group_units * unit_panels
        first = group * m // groups
        rows, end = (group + 1) * m // groups - first, min(begin + unit_panels, num_panels)
        if is_copied:
            source = _TileRows(copied, rows * STRIDE, columns)
            if copied_group != group:
                _copy_rows(x, first, rows, in_features, source, kind)
                copied_group = group
        to = y + 4 * first * n
        if is_widened:
            _multiply_widened(to, n, source, rows, k, weights, (begin, end), sums, kind)
        else:
            bounds = (begin, end, following % group_units * unit_panels)
            _multiply_panels(to, n, source, rows, k, weights, bounds, sums, kind)
        unit = following
    keep_alive(rows_of_x)
    keep_alive(scratch)


def _multiply_float32(args: Any) -> None:
    multiply(args, _FLOAT32)


def _multiply_float16(args: Any) -> None:
    multiply(args, _FLOAT16)


def _multiply_bfloat16(args: Any) -> None:
    multiply(args, _BFLOAT16)


_MULTIPLY = {
    torch.float32: Kernel(_multiply_float32),
    torch.float16: Kernel(_multiply_float16),
    torch.bfloat16: Kernel(_multiply_bfloat16),
}
