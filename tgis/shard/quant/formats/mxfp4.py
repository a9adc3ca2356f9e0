"""Format `mxfp4` of gpt-oss: experts as 4-bit floats (e2m1) with one power of two (e8m0) per 32 weights, from
the Microscaling Formats specification 1.0 of the Open Compute Project."""

from math import prod

import torch
from torch import Tensor

from tgis.shard.checkpoint.code_matrix import CodeMatrix, as_slice
from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.format import Tensors
from tgis.shard.checkpoint.tensors import FileTensor, StoredTensor, WeightsError
from tgis.shard.quant.code_tables import E2M1
from tgis.shard.quant.formats.settings import QuantizationSettings

GROUP = 32
_BYTES = GROUP // 2  # of a group's codes
_MANTISSA_BITS = 23  # of float32
# bfloat16 holds all powers of two that e8m0 does.
LAYOUT = CodeLayout(torch.uint8, 4, GROUP, table=E2M1, scale_type="bfloat16")


class Mxfp4:
    layout = LAYOUT

    def __init__(self, settings: QuantizationSettings):
        """Ignore the settings: the names of tensors say which modules are quantized."""

    def open(self, tensors: Tensors, module: str) -> StoredTensor | None:
        if f"{module}_blocks" not in tensors:
            return None
        return Mxfp4Matrix(*(tensors.fetch_any(f"{module}_{end}") for end in ("blocks", "scales")))

    def count_weights(self, name: str, shape: tuple[int, ...]) -> int | None:
        if name.endswith("_blocks"):
            return 2 * prod(shape)
        return 0 if name.endswith("_scales") else None


class Mxfp4Matrix(CodeMatrix):
    """Matrix, or a stack of experts' matrices. blocks: [num_rows, num_groups, 16], two codes per byte, the
    first in the lower half; scales: [num_rows, num_groups], biased exponents."""

    def __init__(self, blocks: FileTensor, scales: FileTensor):
        self._blocks = blocks
        self._scales = scales
        for tensor in (blocks, scales):
            tensor.check_type(torch.uint8)
        if len(blocks.shape) < 3 or blocks.shape[-1] != _BYTES:
            expected = f"matrices of groups of {_BYTES} bytes"
            raise WeightsError(f"{blocks.label} has shape {list(blocks.shape)}, expected {expected}")
        *stack, num_rows, num_groups, _ = blocks.shape
        scales.check_shape(*stack, num_rows, num_groups)
        super().__init__((*stack, num_rows, num_groups * GROUP), blocks.label, LAYOUT)

    def entry(self, index: int) -> CodeMatrix:
        return Mxfp4Matrix(self._blocks.entry(index), self._scales.entry(index))

    def take(self, rows: range, columns: range) -> Codes:
        groups = slice(columns.start // GROUP, columns.stop // GROUP)
        pairs = self._blocks.read(as_slice(rows), groups)  # [num_rows, num_groups, 16]
        values = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)
        return Codes(self._layout, values, _read_scales(self._scales.read(as_slice(rows), groups)))


def _read_scales(exponents: Tensor) -> Tensor:
    """Return powers of two as float32, which has the same exponents: uint8 e is 2^(e - 127)."""
    smallest = 1 << (_MANTISSA_BITS - 1)  # 2^-127, which is not normal
    bits = exponents.int() << _MANTISSA_BITS
    return bits.where(exponents > 0, smallest).view(torch.float32)
