"""Compiled kernels of matrix products: x W^T for a packed weight and any number of rows. Threads share the
work in units of some rows and panels."""

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.gemm.inner_loop import (
    BLOCK,
    ROWS,
    STRIDE,
    TALL,
    copy,
    fetch_line,
    multiply_tall_tile,
    multiply_tile,
    widen,
)
from tgis.shard.kernels.cpu.gemm.panels import PANEL
from tgis.shard.kernels.cpu.jit.compiler import Kernel, inner, keep, take

NUM_ARGS = 8
LONG = 8  # most panels of a unit
# Most rows and panels of a unit of at least TALL rows. Its sums and a block of its x fit a second-level cache
# together.
MANY, WIDE = 32 * ROWS, 4
LINE = 64  # bytes of a cache line

_F32, _BFLOAT16, _FLOAT16 = np.float32(0), np.uint16(0), np.int16(0)


class Rows(NamedTuple):
    """Rows of x in the layout that tiles read: blocks of columns, whose rows are STRIDE bytes apart."""

    address: Any
    block: int  # bytes of a block


@inner
def _copy_rows(x: int, first: int, rows: int, k: int, blocks: int) -> None:
    """Copy rows of x, [m, k] at an address, from `first` on, to `blocks`: [blocks, rows, STRIDE bytes]."""
    for begin in range(0, k, BLOCK):
        to, size = blocks + begin // BLOCK * rows * STRIDE, 4 * min(BLOCK, k - begin)
        for r in range(rows):
            copy(to + r * STRIDE, x + 4 * ((first + r) * k + begin), size)


@inner
def _multiply_panel(
    out: int, stride: int, x: Any, rows: int, k: int, panel: int, ahead: int, width: int, element: Any
) -> None:
    """Compute out[rows, PANEL] = x @ one panel.

    A row of the panel has `width` bytes; rows of out are `stride` bytes apart. `ahead` is the address of the
    next panel."""
    num_tiles = -(-rows // ROWS)
    for begin in range(0, k, BLOCK):
        count = min(BLOCK, k - begin)
        source, weights = x.address + begin // BLOCK * x.block, panel + begin * width
        following = weights + BLOCK * width if begin + BLOCK < k else ahead
        for tile in range(num_tiles):
            first = tile * rows // num_tiles
            tall = (tile + 1) * rows // num_tiles - first
            to, at = out + first * stride, source + first * STRIDE
            multiply_tile(tall, to, stride, at, weights, following, count, begin == 0, element)


@inner
def _copy_sums(sums: int, rows: int, y: int, n: int, begin: int, end: int) -> None:
    """Copy panels of sums, [panels, rows, PANEL] at an address, to y, without columns past its last one."""
    for r in range(rows):
        for p in range(begin, end):
            source = sums + 4 * PANEL * ((p - begin) * rows + r)
            copy(y + 4 * (r * n + p * PANEL), source, 4 * min(PANEL, n - p * PANEL))


@inner
def _fetch(address: int, size: int, part: int, parts: int) -> None:
    """Prefetch one of `parts` equal parts of `size` bytes."""
    for line in range(size * part // parts // LINE, size * (part + 1) // parts // LINE):
        fetch_line(address + line * LINE)


@inner
def _multiply_wide(
    sums: int, x: int, rows: int, weights: int, count: int, is_first: bool, ahead: int, size: int
) -> None:
    """Compute sums[rows, PANEL] += x @ a block of float32 weights. Prefetch `size` bytes from `ahead`."""
    num_tiles = -(-rows // ROWS)
    for tile in range(num_tiles):
        first = tile * rows // num_tiles
        tall = (tile + 1) * rows // num_tiles - first
        _fetch(ahead, size, tile, num_tiles)
        to, at = sums + 4 * PANEL * first, x + first * STRIDE
        multiply_tall_tile(tall, to, 4 * PANEL, at, weights, weights, count, is_first, _F32)


@inner
def _multiply_tall(
    sums: int, wide: int, x: Any, rows: int, k: int, panels: int, num_panels: int, width: int, element: Any
) -> None:
    """Compute sums[panels, rows, PANEL] = x @ adjacent panels, by blocks. `wide` holds a float32 block."""
    for begin in range(0, k, BLOCK):
        count, source = min(BLOCK, k - begin), x.address + begin // BLOCK * x.block
        for p in range(num_panels):
            weights, to = panels + (p * k + begin) * width, sums + 4 * PANEL * p * rows
            is_last = p + 1 == num_panels
            ahead = panels + (begin + BLOCK) * width if is_last else weights + k * width
            widen(wide, weights, count, element)
            _multiply_wide(to, source, rows, wide, count, begin == 0, ahead, count * width)


@inner
def _multiply_low(
    y: int, n: int, x: Any, rows: int, k: int, weights: int, bounds: Any, spare: int, width: int, element: Any
) -> None:
    """Multiply with some panels without converting them to float32 first.

    `bounds`: the first panel, the one after the last, and the one that the thread reads next."""
    begin, end, following = bounds
    for p in range(begin, end):
        next_p = p + 1 if p + 1 < end else following
        panel, ahead = weights + p * k * width, weights + next_p * k * width
        to, stride = y + 4 * p * PANEL, 4 * n
        is_whole = (p + 1) * PANEL <= n
        if not is_whole:
            to, stride = spare, 4 * PANEL
        _multiply_panel(to, stride, x, rows, k, panel, ahead, width, element)
        if not is_whole:
            _copy_sums(spare, rows, y, n, p, p + 1)


@inner
def _multiply(args: Any, width: int, element: Any) -> None:
    """Compute a matrix product.

    Units are numbered row group by row group, so that a thread can reuse its copy of x for its next units."""
    a = carray(args, NUM_ARGS)
    m, n, k, threads, x, weights, y = a[1], a[2], a[3], a[4], a[5], a[6], a[7]
    num_blocks, num_panels = -(-k // BLOCK), -(-n // PANEL)
    is_tall = m >= TALL
    most = MANY if is_tall else TALL
    groups = -(-m // most)
    most = -(-m // groups)
    run = max(1, min(WIDE if is_tall else LONG, num_panels * groups // (8 * threads)))
    runs = -(-num_panels // run)
    rows_of_x = np.empty(most * num_blocks * STRIDE // 4 if m > 1 else 1, np.float32)
    scratch = np.empty(((most * run + BLOCK if is_tall else most) + 1) * PANEL, np.float32)
    own: Any = np.int64(rows_of_x.ctypes.data)
    spare: Any = (np.int64(scratch.ctypes.data) + LINE - 1) // LINE * LINE
    source = Rows(x, 4 * BLOCK)
    held = -1
    unit = take(args)
    while unit < groups * runs:
        following = take(args)
        group, begin = unit // runs, unit % runs * run
        first = group * m // groups
        rows, end = (group + 1) * m // groups - first, min(begin + run, num_panels)
        if m > 1:
            source = Rows(own, rows * STRIDE)
            if held != group:
                _copy_rows(x, first, rows, k, source.address)
                held = group
        to = y + 4 * first * n
        if is_tall:
            wide, panels = spare + 4 * PANEL * most * run, weights + begin * k * width
            _multiply_tall(spare, wide, source, rows, k, panels, end - begin, width, element)
            _copy_sums(spare, rows, to, n, begin, end)
        else:
            bounds = (begin, end, following % runs * run)
            _multiply_low(to, n, source, rows, k, weights, bounds, spare, width, element)
        unit = following
    keep(rows_of_x)
    keep(scratch)


def _multiply_float32(args: Any) -> None:
    _multiply(args, 4 * PANEL, _F32)


def _multiply_float16(args: Any) -> None:
    _multiply(args, 2 * PANEL, _FLOAT16)


def _multiply_bfloat16(args: Any) -> None:
    _multiply(args, 2 * PANEL, _BFLOAT16)


multiply_float32, multiply_float16 = Kernel(_multiply_float32), Kernel(_multiply_float16)
multiply_bfloat16 = Kernel(_multiply_bfloat16)
