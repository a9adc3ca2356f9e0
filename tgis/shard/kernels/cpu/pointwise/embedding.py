"""Compiled kernels that look up rows of an embedding table, which is stored in the weights' type, select
the ids of a rank's part of it, and clear the rows of others."""

from typing import Any

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.jit.compiler import Kernel, next_unit, operands, ordered, pointer
from tgis.shard.kernels.cpu.jit.scalar_math import ELEMENTS, loaded

_F32, _I64 = np.float32(0), np.int64(0)


@ordered
def _read_row(source: Any, out: Any) -> None:
    for i in range(out.shape[0]):
        out[i] = loaded(source[i])


def _look_up_kernel(element: Any) -> Kernel:
    width = element.itemsize  # bytes

    def look_up(args: Any) -> None:
        num_rows, size, rows_per_unit, ids_address, table, out_address, offset = operands(args, 1, 7)
        ids = carray(pointer(ids_address, _I64), (num_rows,))
        out = carray(pointer(out_address, _F32), (num_rows, size))
        first = next_unit(args) * rows_per_unit
        while first < num_rows:
            for t in range(first, min(num_rows, first + rows_per_unit)):
                row = table + (ids[t] + offset) * size * width
                _read_row(carray(pointer(row, element), (size,)), out[t])
            first = next_unit(args) * rows_per_unit

    return Kernel(look_up)


LOOK_UP = {dtype: _look_up_kernel(element) for dtype, element in ELEMENTS.items()}


def _select_ids(args: Any) -> None:
    count, begin, end, ids_address, local_address, inside_address = operands(args, 1, 6)
    ids = carray(pointer(ids_address, _I64), (count,))
    local, is_inside = (
        carray(pointer(local_address, _I64), (count,)),
        carray(pointer(inside_address, _F32), (count,)),
    )
    first = next_unit(args)
    if first == 0:
        for i in range(count):
            is_own = begin <= ids[i] < end
            local[i] = ids[i] - begin if is_own else 0
            is_inside[i] = 1.0 if is_own else 0.0


select_ids = Kernel(_select_ids)


def _clear_rows(args: Any) -> None:
    num_rows, size, x_address, kept_address = operands(args, 1, 4)
    x = carray(pointer(x_address, _F32), (num_rows, size))
    is_kept = carray(pointer(kept_address, _F32), (num_rows,))
    row = next_unit(args)
    while row < num_rows:
        if is_kept[row] == 0:
            x[row] = 0
        row = next_unit(args)


clear_rows = Kernel(_clear_rows)
