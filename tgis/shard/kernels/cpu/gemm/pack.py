"""Compiled kernels that pack a matrix into the panels of `panels.py`."""

from typing import Any

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.gemm.panels import PANEL
from tgis.shard.kernels.cpu.jit.compiler import Kernel, next_unit, operands, pointer, reorderable

_SQUARE = 16  # columns per pass, so that cache lines that are read and written stay in the cache


@reorderable
def _pack(args: Any, element: Any) -> None:
    """Pack a matrix without converting its elements. A unit of work is a panel."""
    n, k, matrix, panels = operands(args, 1, 4)
    source = carray(pointer(matrix, element), (n, k))
    num_panels = -(-n // PANEL)
    out = carray(pointer(panels, element), (num_panels, k, PANEL))
    panel = next_unit(args)
    while panel < num_panels:
        first = panel * PANEL
        for begin in range(0, k, _SQUARE):
            end = min(begin + _SQUARE, k)
            for r in range(min(PANEL, n - first)):
                for i in range(begin, end):
                    out[panel, i, r] = source[first + r, i]
        panel = next_unit(args)


def _pack_kernel(element: Any) -> Kernel:
    def pack(args: Any) -> None:
        _pack(args, element)

    return Kernel(pack)


PACK = {element.itemsize: _pack_kernel(element) for element in (np.uint16(0), np.uint32(0))}
"""Kernels by the bytes of an element."""
