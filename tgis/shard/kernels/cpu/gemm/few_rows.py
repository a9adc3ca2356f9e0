"""Products with fewer than MANY_ROWS rows. Each thread multiplies all rows by some of the panels."""

from typing import Any

import numpy as np

from tgis.shard.kernels.cpu.gemm.inner_loop import ROWS, STRIDE, multiply_tile
from tgis.shard.kernels.cpu.gemm.operands import LINE, TileRows, copy_last_panel, copy_rows
from tgis.shard.kernels.cpu.gemm.panels import PANEL
from tgis.shard.kernels.cpu.jit.compiler import keep_alive, next_unit, reorderable

_MAX_PANELS = 8  # maximum panels of a unit of work


@reorderable
def _multiply_panel(w: Any, x: Any, out: int, stride: int, panel: int, ahead: int, kind: Any) -> None:
    """Compute out[rows, PANEL] = x @ one panel. `stride` is the bytes between rows of out, `ahead` the
    address of the next panel."""
    num_tiles = -(-w.num_rows // ROWS)
    for begin in range(0, w.k, w.columns):
        count = min(w.columns, w.k - begin)
        source = x.address + begin // w.columns * x.block
        weights = panel + begin * kind.width
        following = weights + w.columns * kind.width if begin + w.columns < w.k else ahead
        for tile in range(num_tiles):
            first = tile * w.num_rows // num_tiles
            rows = (tile + 1) * w.num_rows // num_tiles - first
            to = out + first * stride
            at = source + first * STRIDE
            step = kind.width
            multiply_tile(
                rows, to, stride, to, stride, at, weights, following, step, count, begin == 0, kind.element
            )


@reorderable
def _multiply_panels(w: Any, x: Any, begin: int, end: int, following: int, sums: int, kind: Any) -> None:
    """Multiply by panels [begin, end). The thread's next panel is `following`. `sums` is scratch memory."""
    size = w.k * kind.width
    for p in range(begin, end):
        ahead = w.weights + (p + 1 if p + 1 < end else following) * size
        to = w.y + 4 * p * PANEL
        stride = 4 * w.out_features
        is_whole = (p + 1) * PANEL <= w.out_features
        if not is_whole:
            to = sums
            stride = 4 * PANEL
        _multiply_panel(w, x, to, stride, w.weights + p * size, ahead, kind)
        if not is_whole:
            copy_last_panel(w, sums, w.num_rows, w.y)


@reorderable
def multiply_few_rows(args: Any, w: Any, kind: Any) -> None:
    is_copied = w.num_rows > 1 or kind.columns > 1
    num_panels = -(-w.out_features // PANEL)
    num_blocks = -(-w.k // w.columns)
    unit_panels = max(1, min(_MAX_PANELS, num_panels // (8 * w.num_threads)))
    num_units = -(-num_panels // unit_panels)
    rows_of_x = np.empty(w.num_rows * num_blocks * STRIDE // 4 if is_copied else 1, np.float32)
    scratch = np.empty((w.num_rows + 1) * PANEL, np.float32)
    sums: Any = (np.int64(scratch.ctypes.data) + LINE - 1) // LINE * LINE
    x = TileRows(w.x, 4 * w.columns)
    unit = next_unit(args)
    if is_copied and unit < num_units:
        x = TileRows(np.int64(rows_of_x.ctypes.data), w.num_rows * STRIDE)
        copy_rows(w, 0, w.num_rows, x, kind)
    while unit < num_units:
        following = unit + w.num_threads  # if all threads are equally fast
        begin = unit * unit_panels
        end = min((unit + 1) * unit_panels, num_panels)
        _multiply_panels(w, x, begin, end, following % num_units * unit_panels, sums, kind)
        unit = next_unit(args)
    keep_alive(rows_of_x)
    keep_alive(scratch)
