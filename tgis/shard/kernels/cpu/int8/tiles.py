"""int8 products on AMX tiles, with the panels, activations and resulting bits of `kernels.py`: integer sums
are exact, and floats are added group by group in one chain.

At FEWEST_ROWS rows they are as fast as products without tiles; from 32 rows they are faster."""

from typing import Any

import numpy as np
from llvmlite import ir

from tgis.shard.kernels.cpu.amx import instructions
from tgis.shard.kernels.cpu.amx.inner_loop import (
    DEPTH,
    MEMORY_BYTES,
    PANEL,
    PANEL_ROW,
    QUADS,
    ROWS,
    SUMS_BYTES,
    configure,
    copy_sums,
    multiply,
    release,
    write_shapes,
)
from tgis.shard.kernels.cpu.amx.instructions import ROW_BYTES, TILE_ROWS
from tgis.shard.kernels.cpu.int8.inner_loop import AVX512_VNNI, HEADER, INSTRUCTION_SET, QUAD
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import keep_alive, llvm_function, ordered
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, I32, I64
from tgis.shard.quant.schemes.int8 import GROUP

IS_SUPPORTED = instructions.INSTRUCTIONS is not None and INSTRUCTION_SET is AVX512_VNNI
FEWEST_ROWS = TILE_ROWS + 1

_LANES = 16
_F32 = np.float32(0)
_X_GROUP = HEADER + GROUP
_PANEL_GROUP = (GROUP + 4) * PANEL
_LINE = 64  # bytes of a cache line


@llvm_function()
def _add_group(
    b: Any, totals: Any, sums: Any, headers: Any, stride: Any, scales: Any, rows: Any, is_first: Any
) -> None:
    """Add scales * (sums over a group + corrections) to float32 totals. If `is_first`, overwrite the
    totals."""
    floats, integers = ir.VectorType(FLOAT, _LANES), ir.VectorType(I32, _LANES)
    offsets = [I64(v * ROW_BYTES) for v in range(2)]
    factors = [llvm.load_vector(b, b.add(scales, offset), _LANES) for offset in offsets]
    is_cleared = b.icmp_signed("!=", is_first, I64(0))
    zero = llvm.constant(0.0, _LANES)

    def add_row(r: Any, _: list[Any]) -> list[Any]:
        header = b.add(headers, b.mul(r, stride))
        row = b.mul(r, I64(PANEL_ROW))
        scale = llvm.load_broadcast(b, header, _LANES)
        correction = b.load(llvm.pointer_to(b, I32, header, I64(4)), align=4)
        for factor, offset in zip(factors, offsets, strict=True):
            at = b.add(row, offset)
            exact = b.load(llvm.pointer_to(b, integers, sums, at), align=4)
            value = b.sitofp(b.add(exact, llvm.broadcast(b, correction, _LANES)), floats)
            place = b.add(totals, at)
            total = b.select(is_cleared, zero, llvm.load_vector(b, place, _LANES))
            products = (value, b.fmul(scale, factor), total)
            llvm.store_vector(b, llvm.call(b, f"llvm.fma.v{_LANES}f32", floats, *products), place)
        return []

    llvm.loop(b, rows, [], add_row)


@ordered
def _multiply_group(
    memory: int, sums: int, x: int, stride: int, rows: int, panel: int, num_quads: int
) -> None:
    """Compute the sums over a group with tiles configured for whole groups. A partial group changes the
    configuration."""
    count = num_quads // DEPTH
    rest = num_quads % DEPTH
    if count > 0:
        multiply(memory, sums, sums, PANEL_ROW, x, stride, rows, panel, count, True, QUADS)
    if rest > 0:
        write_shapes(memory, rows, rest)
        configure(memory)
        x += count * ROW_BYTES
        panel += count * DEPTH * PANEL_ROW
        multiply(memory, sums, sums, PANEL_ROW, x, stride, rows, panel, 1, count == 0, QUADS)


@ordered
def multiply_rows(
    out: int, width: int, x: int, stride: int, rows: int, panel: int, groups: int, quads: int, columns: int
) -> None:
    """Multiply rows by a panel. quads: number of quads in the last group. width, stride: bytes between rows
    of out and of x."""
    scratch = np.empty(_LINE + 2 * SUMS_BYTES + MEMORY_BYTES, np.uint8)
    sums: Any = (np.int64(scratch.ctypes.data) + _LINE - 1) // _LINE * _LINE
    totals = sums + SUMS_BYTES
    memory = sums + 2 * SUMS_BYTES
    for row in range(0, rows, ROWS):
        height = min(ROWS, rows - row)
        write_shapes(memory, height, DEPTH)
        configure(memory)
        for g in range(groups):
            headers = x + row * stride + g * _X_GROUP
            weights = panel + g * _PANEL_GROUP
            num_quads = GROUP // QUAD if g < groups - 1 else quads
            _multiply_group(memory, sums, headers + HEADER, stride, height, weights, num_quads)
            scales = weights + num_quads * PANEL_ROW
            _add_group(totals, sums, headers, stride, scales, height, g == 0)
        copy_sums(totals, height, columns, out + row * width, width, _F32)
    release(memory)
    keep_alive(scratch)
