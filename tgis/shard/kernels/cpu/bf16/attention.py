"""Attention with bfloat16 arithmetic: queries, keys, values and softmax weights are rounded to bfloat16, and
sums are float32. A sum adds products in the same order with pairs and without, so the bits are the same."""

import numpy as np
import torch

from tgis.shard.kernels.cpu.attention.attention import CacheKernels
from tgis.shard.kernels.cpu.attention.kernels import WRITE, attend_kernel, write_kernel
from tgis.shard.kernels.cpu.gemm import pairs

_U16 = np.uint16(0)  # of a bfloat16 number's bits, and of float32 numbers rounded to bfloat16
_PAIR = np.uint32(0)

ROUNDED = CacheKernels(attend_kernel(_U16, factor=_U16), WRITE[torch.bfloat16])
"""Kernels that round, and compute in float32, on any processor."""

PAIRS = (
    CacheKernels(
        attend_kernel(_PAIR, factor=_PAIR, columns=pairs.COLUMNS),
        write_kernel(_U16, columns=pairs.COLUMNS),
        pairs.COLUMNS,
    )
    if pairs.is_supported()
    else None
)
"""None if the processor does not multiply pairs."""
