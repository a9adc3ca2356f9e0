"""Compiled kernels that multiply float32 rows with float panels."""

from typing import Any

import numpy as np
import torch

from tgis.shard.kernels.cpu.gemm.few_rows import multiply_few_rows
from tgis.shard.kernels.cpu.gemm.inner_loop import MANY_ROWS
from tgis.shard.kernels.cpu.gemm.many_rows import multiply_many_rows
from tgis.shard.kernels.cpu.gemm.operands import PanelKind, describe_product
from tgis.shard.kernels.cpu.gemm.panels import PANEL
from tgis.shard.kernels.cpu.jit.compiler import Kernel, reorderable

_F32 = np.float32(0)
_FLOAT32 = PanelKind(width=4 * PANEL, element=_F32, factor=_F32)
_FLOAT16 = PanelKind(width=2 * PANEL, element=np.int16(0), factor=_F32)
_BFLOAT16 = PanelKind(width=2 * PANEL, element=np.uint16(0), factor=_F32)


@reorderable
def multiply(args: Any, kind: Any) -> None:
    """Compute a matrix product. A unit of work is several rows and panels."""
    w = describe_product(args, kind)
    if w.num_rows < MANY_ROWS:
        multiply_few_rows(args, w, kind)
    else:
        multiply_many_rows(args, w, kind)


def _multiply_float32(args: Any) -> None:
    multiply(args, _FLOAT32)


def _multiply_float16(args: Any) -> None:
    multiply(args, _FLOAT16)


def _multiply_bfloat16(args: Any) -> None:
    multiply(args, _BFLOAT16)


MULTIPLY = {
    torch.float32: Kernel(_multiply_float32),
    torch.float16: Kernel(_multiply_float16),
    torch.bfloat16: Kernel(_multiply_bfloat16),
}
"""Kernels by the type of weights."""
