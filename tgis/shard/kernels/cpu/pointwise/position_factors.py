"""Compiled kernel of factors that grow with the position."""

from typing import Any

import numpy as np
from numba import carray

from tgis.shard.kernels.cpu.jit.compiler import Kernel, as_float, next_unit, operands, pointer

_F32, _I64 = np.float32(0), np.int64(0)


def _position_factors(args: Any) -> None:
    num_tokens, beta_bits, length, shift, positions_address, out_address = operands(args, 1, 6)
    positions = carray(pointer(positions_address, _I64), (num_tokens,))
    out = carray(pointer(out_address, _F32), (num_tokens,))
    beta = as_float(beta_bits)
    t = next_unit(args)
    while t < num_tokens:
        out[t] = np.float32(1) + beta * np.float32(np.log(np.float64(1 + (positions[t] + shift) // length)))
        t = next_unit(args)


position_factors = Kernel(_position_factors)
