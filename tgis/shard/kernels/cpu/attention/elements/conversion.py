"""Conversion of the cache's elements from and to float32."""

from typing import Any

from numba import types

from tgis.shard.kernels.cpu.attention.elements.float8 import (
    FLOAT8_ELEMENTS,
    FORMATS,
    build_float8,
    load_float8,
)
from tgis.shard.kernels.cpu.attention.elements.int8 import CODE, INT8_ELEMENTS, build_code, load_codes
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import intrinsic
from tgis.shard.kernels.cpu.jit.scalar_math import ELEMENTS, build_stored
from tgis.shard.kernels.cpu.jit.vectors import LANES

# Type of the cache -> a value of the numba type of its elements.
CACHE_ELEMENTS = {**ELEMENTS, **FLOAT8_ELEMENTS, **INT8_ELEMENTS}


def load_cached(b: Any, base: Any, offset: Any, element: Any) -> Any:
    """Load LANES elements of the cache and convert them to float32. 8-bit floats still lack their
    `read_factor`, and codes their scales."""
    address = b.add(base, offset)
    if element in FORMATS:
        return load_float8(b, address, LANES, element)
    if element == CODE:
        return load_codes(b, address, LANES)
    return llvm.load_stored(b, address, LANES, element, align=2)


@intrinsic
def as_element(typingctx: Any, x: Any, element: Any) -> Any:
    """Convert float32 `x` to a type of CACHE_ELEMENTS. 8-bit floats saturate."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if element in FORMATS:
            return build_float8(b, args[0], element)
        if element == CODE:
            return build_code(b, args[0])
        return build_stored(b, args[0], element)

    return element(types.float32, element), generate
