"""Processor mode in which vector instructions count numbers below 2**-126 as zeros, as AMX always does. Rows
have the same bits with and without tiles only in this mode."""

from typing import Any

from llvmlite import ir
from numba import types

from tgis.shard.kernels.cpu.attention.operands import TILE_PAIR
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function
from tgis.shard.kernels.cpu.jit.llvm import I8, I32, I64

_FLUSHES = 1 << 15 | 1 << 6  # bits of MXCSR: for results, and for operands


@llvm_function(types.int64)
def flush_tiny_numbers(b: Any, element: Any) -> Any:
    """Set this thread's mode if elements of this type are multiplied by AMX. Return the mode before."""
    if element != TILE_PAIR:
        return I64(0)
    place = b.alloca(I32)
    _call(b, "stmxcsr", place)
    before = b.load(place)
    b.store(b.or_(before, I32(_FLUSHES)), place)
    _call(b, "ldmxcsr", place)
    return b.zext(before, I64)


@llvm_function()
def restore_mode(b: Any, mode: Any, element: Any) -> None:
    """Set the mode that `flush_tiny_numbers` returned."""
    if element != TILE_PAIR:
        return
    place = b.alloca(I32)
    b.store(b.trunc(mode, I32), place)
    _call(b, "ldmxcsr", place)


def _call(b: Any, name: str, place: Any) -> None:
    llvm.call(b, f"llvm.x86.sse.{name}", ir.VoidType(), b.bitcast(place, I8.as_pointer()))
