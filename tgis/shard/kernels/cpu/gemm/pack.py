"""Compiled kernels that pack a matrix into the panels of `panels.py`."""

from typing import Any

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.gemm.panels import PANEL
from tgis.shard.kernels.cpu.jit.compiler import Kernel, inner, pointer, take

_SQUARE = 16  # columns at a time, so that both the read and the written lines stay in the cache

_U16, _U32 = np.uint16(0), np.uint32(0)


@inner
def _pack(args: Any, element: Any) -> None:
    """Pack a matrix. A unit of work is a panel. Elements are copied without conversion."""
    a = carray(args, 5)
    n, k = a[1], a[2]
    source = carray(pointer(a[3], element), (n, k))
    num_panels = -(-n // PANEL)
    out = carray(pointer(a[4], element), (num_panels, k, PANEL))
    panel = take(args)
    while panel < num_panels:
        first = panel * PANEL
        for begin in range(0, k, _SQUARE):
            end = min(begin + _SQUARE, k)
            for r in range(min(PANEL, n - first)):
                for i in range(begin, end):
                    out[panel, i, r] = source[first + r, i]
        panel = take(args)


def _pack_16_bits(args: Any) -> None:
    _pack(args, _U16)


def _pack_32_bits(args: Any) -> None:
    _pack(args, _U32)


pack_16_bits, pack_32_bits = Kernel(_pack_16_bits), Kernel(_pack_32_bits)
