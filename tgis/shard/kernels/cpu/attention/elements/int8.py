"""8-bit integers as elements of the cache. Each token's key and value of a head have a float32 scale, the
largest magnitude divided by 127. The scales of a page follow its codes, at the next multiple of 4 bytes. Keys
are rotated before they are rounded (see `rotation.py`).

Attention multiplies scores by the scales of keys, and softmax weights by the scales of values, so the inner
loops only convert integers. A key or value that contains infinity or NaN has scale NaN."""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import typeof_impl

from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import llvm_function, ordered
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, I1, I8, I32
from tgis.shard.kernels.cpu.jit.vectors import poke
from tgis.shard.memory.kv_cache import SCALE_BYTES

LARGEST = 127  # code of the largest magnitude
_TINY = np.float32(1e-30)  # keys and values whose largest magnitude is smaller become zeros
_F32 = np.float32(0)


class CodeNumber(int):
    """Number whose numba type is CODE."""


# Differs from numba's int8, which means e4m3.
CODE = types.Integer("int8_code", 8, True)
INT8_ELEMENTS = {torch.int8: CodeNumber(0)}


def _find_type(value: CodeNumber, context: Any) -> Any:
    return CODE


typeof_impl.register(CodeNumber, _find_type)


@llvm_function(types.boolean)
def has_scales(b: Any, element: Any) -> Any:
    """Return True if elements of this type have scales."""
    return I1(element == CODE)


def load_codes(b: Any, address: Any, lanes: int) -> Any:
    """Load a vector of codes and convert it to float32."""
    codes = b.load(llvm.pointer_to(b, ir.VectorType(I8, lanes), address), align=1)
    return b.sitofp(b.sext(codes, ir.VectorType(I32, lanes)), ir.VectorType(FLOAT, lanes))


def build_code(b: Any, x: Any) -> Any:
    """Emit the rounding of float32 `x`, at most LARGEST in magnitude, to an integer, half to even."""
    return b.trunc(b.fptosi(llvm.call(b, "llvm.rint.f32", FLOAT, x), I32), I8)


@ordered
def find_scales(p: Any) -> Any:
    """Return the offset of the scales in a page, in bytes."""
    return (p.head_dim * p.block_size + SCALE_BYTES - 1) // SCALE_BYTES * SCALE_BYTES


@ordered
def find_scale(x: Any) -> Any:
    """Return the scale of a key or value: 0 if all magnitudes are tiny, NaN if one is not finite."""
    largest = np.float32(0)
    is_finite = True
    for d in range(len(x)):
        largest = max(largest, abs(x[d]))
        is_finite &= abs(x[d]) < np.float32(np.inf)
    if not is_finite:
        return np.float32(np.nan)
    return largest / np.float32(LARGEST) if largest >= _TINY else np.float32(0)


@ordered
def write_scale(x: Any, page: int, offset: int, p: Any) -> Any:
    """Write the scale of a token's key or value to its page. Return the factor of its codes."""
    scale = find_scale(x)
    poke(page + find_scales(p) + SCALE_BYTES * offset, scale)
    return np.float32(1) / scale if scale > np.float32(0) else np.float32(0)
