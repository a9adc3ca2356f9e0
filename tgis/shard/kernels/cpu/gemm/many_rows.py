"""Products with at least MANY_ROWS rows, in groups of rows that a thread copies before it multiplies them.

Weights are converted to float32 once for all rows of a group. Threads take units from both ends of the list,
so that two threads copy at most one group twice, the one where they meet."""

from typing import Any, NamedTuple

import numpy as np

from tgis.shard.kernels.cpu.gemm.inner_loop import BLOCK, ROWS, STRIDE, multiply_tall_tile, widen
from tgis.shard.kernels.cpu.gemm.operands import LINE, TileRows, copy_last_panel, copy_rows
from tgis.shard.kernels.cpu.gemm.panels import PANEL
from tgis.shard.kernels.cpu.jit.compiler import atomic_add, keep_alive, reorderable

# Maximum rows of a group and panels of a unit. A unit's sums and a block of its rows of x together fit the
# second-level cache.
MAX_ROWS = 24 * ROWS
_MAX_PANELS = 4

# Parts of the counter: units taken from the front, units taken from the back, and threads that entered.
_BITS = 28
_PART = (1 << _BITS) - 1
_arrive, _take_first, _take_last = (atomic_add(1 << bit, "monotonic") for bit in (2 * _BITS, 0, _BITS))


class _Group(NamedTuple):
    """Group of rows of x."""

    first: Any
    rows: Any
    x: Any  # TileRows


class _Sums(NamedTuple):
    """Sums of rows and a panel, float32 [rows, PANEL]."""

    address: Any
    stride: Any  # bytes from one row to the next


@reorderable
def _take_unit(args: Any, is_last: bool, num_units: int) -> Any:
    """Return the number of a unit that no other thread gets, or -1 if none is left."""
    taken = _take_last(args) if is_last else _take_first(args)
    first, last = taken & _PART, taken >> _BITS & _PART
    if first + last >= num_units:
        return np.int64(-1)
    return num_units - 1 - last if is_last else first


@reorderable
def _multiply_block(
    x: int, rows: int, sums: Any, out: Any, weights: int, ahead: int, count: int, is_first: bool, kind: Any
) -> None:
    """Compute out[rows, PANEL] = sums + x @ a block of weights of x's type. The tiles share the prefetching
    of the block at `ahead`."""
    num_tiles = -(-rows // ROWS)
    step = -(-kind.width // num_tiles)
    for tile in range(num_tiles):
        first = tile * rows // num_tiles
        height = (tile + 1) * rows // num_tiles - first
        source, to = sums.address + first * sums.stride, out.address + first * out.stride
        at = x + first * STRIDE
        part = ahead + tile * count * step
        stride = sums.stride
        multiply_tall_tile(
            height, source, stride, to, out.stride, at, weights, part, step, count, is_first, kind.factor
        )


@reorderable
def _multiply_panels(w: Any, group: Any, panels: Any, scratch: int, kind: Any) -> None:
    """Multiply by panels, block by block of x's columns. panels: begin, end, and the probable next panel of
    the thread. scratch: address of memory for sums [panels, rows, PANEL] and a converted block. The sums of
    the last block are written to y."""
    begin, end, following = panels
    rows = group.rows
    y = w.y + 4 * group.first * w.out_features
    converted = scratch + 4 * PANEL * rows * (end - begin)
    for column in range(0, w.k, w.columns):
        count = min(w.columns, w.k - column)
        x = group.x.address + column // w.columns * group.x.block
        for p in range(begin, end):
            weights = w.weights + (p * w.k + column) * kind.width
            ahead = weights + w.k * kind.width
            if p + 1 == end:
                next_column = column + w.columns
                row = begin * w.k + next_column if next_column < w.k else following * w.k
                ahead = w.weights + row * kind.width
            if kind.is_widened:
                widen(converted, weights, count, kind.element)
                weights = converted
            sums = _Sums(scratch + 4 * PANEL * (p - begin) * rows, 4 * PANEL)
            is_written = column + w.columns >= w.k and (p + 1) * PANEL <= w.out_features
            out = _Sums(y + 4 * PANEL * p, 4 * w.out_features) if is_written else sums
            _multiply_block(x, rows, sums, out, weights, ahead, count, column == 0, kind)
    if end * PANEL > w.out_features:
        copy_last_panel(w, scratch + 4 * PANEL * (end - 1 - begin) * rows, rows, y)


@reorderable
def multiply_many_rows(args: Any, w: Any, kind: Any) -> None:
    groups = -(-w.num_rows // MAX_ROWS)
    max_rows = -(-w.num_rows // groups)
    num_panels = -(-w.out_features // PANEL)
    num_blocks = -(-w.k // w.columns)
    unit_panels = max(1, min(_MAX_PANELS, num_panels * groups // (8 * w.num_threads)))
    group_units = -(-num_panels // unit_panels)
    rows_of_x = np.empty(max_rows * num_blocks * STRIDE // 4, np.float32)
    memory = np.empty((max_rows * unit_panels + BLOCK + 1) * PANEL, np.float32)
    scratch: Any = (np.int64(memory.ctypes.data) + LINE - 1) // LINE * LINE
    copied = np.int64(-1)
    is_last = (_arrive(args) >> 2 * _BITS & 1) == 1
    unit = _take_unit(args, is_last, groups * group_units)
    while unit >= 0:
        number = unit // group_units
        begin = unit % group_units * unit_panels
        first = number * w.num_rows // groups
        end = min(begin + unit_panels, num_panels)
        rows = (number + 1) * w.num_rows // groups - first
        x = TileRows(np.int64(rows_of_x.ctypes.data), rows * STRIDE)
        if copied != number:
            copy_rows(w, first, rows, x, kind)
            copied = number
        following = max(0, begin - unit_panels) if is_last else end % num_panels
        _multiply_panels(w, _Group(first, rows, x), (begin, end, following), scratch, kind)
        unit = _take_unit(args, is_last, groups * group_units)
    keep_alive(rows_of_x)
    keep_alive(memory)
