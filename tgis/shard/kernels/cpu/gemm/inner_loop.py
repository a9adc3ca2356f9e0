"""Builders of the LLVM code of the inner loop of matrix products: rows of x times one panel of a weight, with
the sums in registers. Every sum is one chain of fused multiply-adds in the order of x's columns, so its bits
depend only on its row and weights. In panels of pairs (`pairs.py`), a column means a pair of columns of x."""

import functools
from dataclasses import dataclass
from typing import Any

from numba.core.cgutils import raw_memcpy

from tgis.shard.kernels.cpu.gemm import pairs
from tgis.shard.kernels.cpu.gemm.pairs import PAIR
from tgis.shard.kernels.cpu.gemm.panels import LANES, PANEL
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import I8, I64

# Maximum rows of a tile. Its sums, two vectors of weights and one of x fill the registers.
ROWS = 12 if LANES == 16 else 6
# Maximum columns of x per block, so that the rows of a tile fit the first-level cache. Panels come from the
# second-level cache, which is fast enough.
BLOCK = 384
MANY_ROWS = 4 * ROWS  # minimum rows for which weights are converted to float32 once, not in each tile
# Minimum rows of a tile if at least MANY_ROWS rows are split into tiles of equal height. Saves code to
# compile.
TALL = ROWS * 3 // 4
# Bytes between rows of a copy of x. Not a power of two, so that rows do not evict each other from the cache.
STRIDE = 4 * (BLOCK + 16)

# Maximum rows for which the processor's own prefetching of weights is fast enough. With more rows, the code
# prefetches. Rows of pairs take half the time.
STREAMED, STREAMED_PAIRS = 2, 4

_VECTORS = PANEL // LANES
_LINE = 64


def _load_weights(b: Any, address: Any, offset: int, element: Any) -> Any:
    place = b.add(address, I64(offset))
    if element == PAIR:
        return pairs.load(b, place, LANES)
    return llvm.load_stored(b, place, LANES, element, align=32)


def _make_tile(is_tall: bool) -> Any:
    """Build a kernel function:
    out[:rows, :PANEL] = sums[:rows, :PANEL] + x[:rows, :count] @ weights[:count, :PANEL].

    If `is_first`, the sums are 0 and not read. rows: up to ROWS, and at least TALL if `is_tall`. count: at
    least 1. sums, out, x: addresses of float32; rows of x are STRIDE bytes apart. weights: address of a panel
    of `element`'s type. The code may prefetch `ahead_step` bytes per column, beginning at address `ahead`."""

    @llvm_function()
    def multiply(
        b: Any,
        rows: Any,
        sums: Any,
        sums_stride: Any,
        out: Any,
        out_stride: Any,
        x: Any,
        weights: Any,
        ahead: Any,
        ahead_step: Any,
        count: Any,
        is_first: Any,
        element: Any,
    ) -> None:
        end = b.append_basic_block("end")
        cases = b.switch(rows, end)
        for num_rows in range(TALL if is_tall else 1, ROWS + 1):
            block = b.append_basic_block(f"rows{num_rows}")
            cases.add_case(I64(num_rows), block)
            b.position_at_end(block)
            target = _find_cells(b, out, out_stride, num_rows)
            prefetch = _prefetch_for_tall if is_tall else _prefetch_panel
            if is_tall:
                for place in target[:: _LINE // (4 * LANES)]:
                    llvm.prefetch_for_writing(b, place, I64(0))
            initial = _load_sums(b, _find_cells(b, sums, sums_stride, num_rows), is_first)
            tile = _PanelTile(num_rows, x, weights, ahead, ahead_step, element)
            totals = llvm.loop(b, count, initial, functools.partial(tile.add_column, b, prefetch))
            for place, total in zip(target, totals, strict=True):
                llvm.store_vector(b, total, place)
            b.branch(end)
        b.position_at_end(end)

    return multiply


def _find_cells(b: Any, address: Any, stride: Any, num_rows: int) -> list[Any]:
    """Emit the addresses of a tile's vectors, row by row."""
    begins = [b.add(address, b.mul(I64(r), stride)) for r in range(num_rows)]
    return [b.add(begin, I64(4 * LANES * v)) for begin in begins for v in range(_VECTORS)]


def _load_sums(b: Any, places: list[Any], is_first: Any) -> list[Any]:
    """Emit the load of a tile's sums, or zeros."""
    begin = b.block
    load = b.append_basic_block("load")
    begun = b.append_basic_block("begun")
    b.cbranch(b.icmp_signed("!=", is_first, I64(0)), begun, load)
    b.position_at_end(load)
    loaded = [llvm.load_vector(b, place, LANES) for place in places]
    b.branch(begun)
    b.position_at_end(begun)
    zero = llvm.constant(0.0, LANES)
    return [llvm.choose(b, load, total, begin, zero) for total in loaded]


@dataclass(frozen=True)
class _PanelTile:
    """Builder of a tile's loop over columns."""

    num_rows: int
    x: Any
    weights: Any
    ahead: Any
    ahead_step: Any
    element: Any

    @property
    def step(self) -> int:
        """Bytes of a row of the panel."""
        size: int = PANEL * self.element.bitwidth // 8
        return size

    def add_column(self, b: Any, prefetch: Any, k: Any, sums: list[Any]) -> list[Any]:
        weight = b.add(self.weights, b.mul(k, I64(self.step)))
        column = b.add(self.x, b.mul(k, I64(4)))
        offsets = range(0, self.step, self.step // _VECTORS)
        loaded = [_load_weights(b, weight, offset, self.element) for offset in offsets]
        prefetch(b, self, k)
        changed = []
        for r in range(self.num_rows):
            factor = pairs.load_factor(b, b.add(column, I64(r * STRIDE)), LANES, self.element)
            row_sums = sums[r * _VECTORS : (r + 1) * _VECTORS]
            changed += pairs.add_products(b, row_sums, [factor], loaded, self.element)
        return changed


def _prefetch_panel(b: Any, tile: _PanelTile, k: Any) -> None:
    """Prefetch a row of a panel unless the tile has few rows."""
    if tile.num_rows > (STREAMED_PAIRS if tile.element == PAIR else STREAMED):
        for offset in range(0, tile.step, _LINE):
            llvm.prefetch(b, b.add(tile.ahead, b.mul(k, tile.ahead_step)), I64(offset))


def _prefetch_for_tall(b: Any, tile: _PanelTile, k: Any) -> None:
    """Prefetch this tile's share of the memory at `ahead`, and the next tile's rows of x."""
    llvm.prefetch(b, b.add(tile.ahead, b.mul(k, tile.ahead_step)), I64(0))
    llvm.prefetch(b, b.add(tile.x, b.mul(k, I64(_LINE))), I64(tile.num_rows * STRIDE))


multiply_tile, multiply_tall_tile = _make_tile(is_tall=False), _make_tile(is_tall=True)


@llvm_function()
def widen(b: Any, to: Any, weights: Any, count: Any, element: Any) -> None:
    """Convert `count` rows of a panel of `element`'s type to float32 at the address `to`."""
    step = PANEL * element.bitwidth // 8

    def widen_row(k: Any, _: list[Any]) -> list[Any]:
        source = b.add(weights, b.mul(k, I64(step)))
        target = b.add(to, b.mul(k, I64(4 * PANEL)))
        for v in range(_VECTORS):
            loaded = _load_weights(b, source, v * step // _VECTORS, element)
            llvm.store_vector(b, loaded, b.add(target, I64(4 * LANES * v)), align=32)
        return []

    llvm.loop(b, count, [], widen_row)


@llvm_function()
def copy_columns(b: Any, to: Any, source: Any, count: Any, element: Any) -> None:
    """Copy `count` (at least 1) float32 columns of a row of x to the address `to`, in the form that tiles of
    `element`'s type read. If the form is pairs, an odd last column is paired with 0."""
    if element == PAIR:
        pairs.copy_rounded(b, to, source, count)
    else:
        _copy_bytes(b, to, source, b.mul(count, I64(4)))


@llvm_function()
def copy(b: Any, to: Any, source: Any, num_bytes: Any) -> None:
    _copy_bytes(b, to, source, num_bytes)


def _copy_bytes(b: Any, to: Any, source: Any, num_bytes: Any) -> None:
    raw_memcpy(b, llvm.pointer_to(b, I8, to), llvm.pointer_to(b, I8, source), num_bytes, I64(1))
