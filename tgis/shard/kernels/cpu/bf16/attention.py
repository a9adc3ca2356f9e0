"""Attention with bfloat16 arithmetic: queries, keys, values and softmax weights are rounded to bfloat16, and
sums are float32. A sum adds products in the same order with pairs and without, so the bits are the same."""

import numpy as np
import torch

from tgis.shard.kernels.cpu.attention.attention import CacheKernels
from tgis.shard.kernels.cpu.attention.kernels import WRITE, attend_kernel
from tgis.shard.kernels.cpu.attention.pair_pages import WRITE_PAIRS
from tgis.shard.kernels.cpu.gemm import pairs

_U16 = np.uint16(0)  # of a bfloat16 number's bits, and of float32 numbers rounded to bfloat16
_PAIR = np.uint32(0)

ROUNDED = CacheKernels(attend_kernel(_U16, _U16), WRITE[torch.bfloat16])
"""Kernels that round, and compute in float32, on any processor."""

PAIRS = WRITE_PAIRS and CacheKernels(attend_kernel(_PAIR, _PAIR, pairs.COLUMNS), WRITE_PAIRS, pairs.COLUMNS)
"""None if the processor does not multiply pairs."""
