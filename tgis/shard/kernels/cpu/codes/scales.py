"""Conversion of the scales and offsets of pieces to float32."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from tgis.shard.kernels.cpu.codes.layout import COLUMNS, PLANE, VECTORS, ScaleForm
from tgis.shard.kernels.cpu.gemm.panels import LANES
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function, ordered
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, I8, I32, I64

_FLOAT32, _FLOAT16, _BFLOAT16 = np.float32(0), np.int16(0), np.uint16(0)
_INTEGER, _LOWER, _UPPER = np.int8(0), np.uint8(0), np.uint32(0)
# The forms as constants of kernels.
_IS_FLOAT32, _IS_FLOAT16, _IS_BFLOAT16, _IS_INT8 = (
    int(form) for form in (ScaleForm.float32, ScaleForm.float16, ScaleForm.bfloat16, ScaleForm.int8)
)


@ordered
def find_scales(w: Any, panel: int, piece: int, at: int, to: int, centre: int) -> int:
    """Return the address of the float32 scales of the piece at an address, followed by its offsets, if any.
    Offsets are adapted to codes from which `centre` is subtracted. Converted values are written to `to`."""
    if w.scale_form == _IS_FLOAT32 and not w.has_offsets:
        return at
    if w.scale_form == _IS_FLOAT16:
        _convert(w, at, to, 0, 2 * COLUMNS, _FLOAT16, _FLOAT16)
    elif w.scale_form == _IS_FLOAT32:
        _convert(w, at, to, 0, 4 * COLUMNS, _FLOAT32, _FLOAT32)
    elif w.scale_form == _IS_BFLOAT16:
        _convert(w, at, to, 0, 2 * COLUMNS, _BFLOAT16, _BFLOAT16)
    elif w.scale_form == _IS_INT8:
        _convert(w, at, to, _find_factors(w, panel, piece), COLUMNS, _INTEGER, _INTEGER)
    else:
        _convert(w, at, to, _find_factors(w, panel, piece), 0, _LOWER, _UPPER)
    if w.has_offsets and centre:
        _move_centre(to, centre)
    return to


@ordered
def _find_factors(w: Any, panel: int, piece: int) -> Any:
    """Return the address of the factors of a piece's scales and offsets."""
    place = piece + w.first_piece
    planes = 1 + w.has_offsets
    num_factors = -(-(-(-w.in_features // w.columns) + w.first_piece) // w.pieces_per_factor)
    return w.factors + (panel * num_factors + place // w.pieces_per_factor) * planes * PLANE


@ordered
def _convert(w: Any, at: int, to: int, factors: int, after: int, element: Any, of_offsets: Any) -> None:
    """Convert scales, and offsets, which follow after `after` bytes."""
    _convert_plane(at, to, factors, element)
    if w.has_offsets:
        _convert_plane(at + after, to + PLANE, factors + PLANE, of_offsets)


@llvm_function()
def _convert_plane(b: Any, at: Any, to: Any, factors: Any, element: Any) -> None:
    """Write one number per column of a panel as float32: a stored float, or an integer times its factor."""
    for v in range(VECTORS):
        place = I64(4 * LANES * v)
        if element in llvm.STORED:
            size = {types.float32: 4}.get(element, 2)
            converted = llvm.load_stored(b, b.add(at, I64(size * LANES * v)), LANES, element, size)
        else:
            integers = _load_integers(b, b.add(at, I64(LANES * v)), element)
            converted = b.fmul(b.sitofp(integers, ir.VectorType(FLOAT, LANES)), _load(b, factors, place))
        llvm.store_vector(b, converted, b.add(to, place))


def _load_integers(b: Any, at: Any, element: Any) -> Any:
    loaded = b.load(llvm.pointer_to(b, ir.VectorType(I8, LANES), at), align=1)
    words = ir.VectorType(I32, LANES)
    if element == types.int8:
        return b.sext(loaded, words)
    shifted = b.lshr(loaded, llvm.constant(4, LANES, I8)) if element == types.uint32 else loaded
    return b.zext(b.and_(shifted, llvm.constant(15, LANES, I8)), words)


@llvm_function()
def _move_centre(b: Any, to: Any, centre: Any) -> None:
    """Add scales * centre to offsets."""
    factor = llvm.broadcast(b, b.sitofp(centre, FLOAT), LANES)
    for v in range(VECTORS):
        place = I64(4 * LANES * v)
        at = b.add(to, I64(PLANE))
        moved = llvm.multiply_add(b, _load(b, to, place), factor, _load(b, at, place))
        llvm.store_vector(b, moved, b.add(at, place))


def _load(b: Any, base: Any, offset: Any) -> Any:
    return llvm.load_vector(b, b.add(base, offset), LANES)
