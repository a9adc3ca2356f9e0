"""Formats `fp8` and `fbgemm_fp8`: weights as 8-bit floats (e4m3) with one scale per matrix, row or block of
rows and columns."""

import torch

from tgis.shard.checkpoint.code_matrix import CodeMatrix, as_slice
from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.format import Tensors
from tgis.shard.checkpoint.tensors import DTYPES, FileTensor, StoredTensor, WeightsError
from tgis.shard.quant.formats.settings import QuantizationSettings

E4M3 = torch.float8_e4m3fn
# Scales of blocks have the second name, although they are not inverses.
_SCALES = ("weight_scale", "weight_scale_inv")

Block = tuple[int, int]
"""Numbers of rows and columns that share a scale."""


class Fp8:
    def __init__(self, settings: QuantizationSettings):
        self._block = settings.pair("weight_block_size")
        self.layout = CodeLayout(E4M3, 8, self._block[1] if self._block else None)

    def open(self, tensors: Tensors, module: str) -> StoredTensor | None:
        return open_float8(tensors, module, self._block)

    def count_weights(self, name: str, shape: tuple[int, ...]) -> int | None:
        return 0 if name.endswith(_SCALES) else None


def open_float8(tensors: Tensors, module: str, block: Block | None) -> StoredTensor | None:
    """Return a module's weight, or None if it is not stored as 8-bit floats. `block` applies to scales that
    are neither per matrix nor per row. Raises WeightsError."""
    if f"{module}.weight" not in tensors:
        return None
    weight = tensors.fetch_any(f"{module}.weight")
    if weight.dtype != E4M3 or len(weight.shape) < 2:
        return None
    names = [f"{module}.{end}" for end in _SCALES]
    scales_name = next((name for name in names if name in tensors), None)
    if scales_name is None:
        raise WeightsError(f"{weight.label} has no scales: there is neither {names[0]} nor {names[1]}")
    scales = tensors.fetch_any(scales_name)
    scales.check_type(*DTYPES.values())
    return Float8Matrix(weight, scales, block)


class Float8Matrix(CodeMatrix):
    """Matrix, or a stack of experts' matrices with a stack of scales."""

    def __init__(self, weight: FileTensor, scales: FileTensor, block: Block | None):
        self._weight = weight
        self._scales = scales
        self._asked = block
        self._block = _find_block(weight, scales, block)
        columns = self._block[1]
        group = columns if columns < weight.shape[-1] else None
        super().__init__(weight.shape, weight.label, CodeLayout(E4M3, 8, group))

    def entry(self, index: int) -> "Float8Matrix":
        return Float8Matrix(self._weight.entry(index), self._scales.entry(index), self._asked)

    def take(self, rows: range, columns: range) -> Codes:
        height, width = self._block
        num_groups = -(-self.shape[1] // width)
        grid = self._scales.read().float().reshape(-1, num_groups)
        own = grid[torch.arange(rows.start, rows.stop) // height]  # [num_rows, num_groups]
        groups = slice(columns.start // width, -(-columns.stop // width))
        return Codes(self._layout, self._weight.read(as_slice(rows), as_slice(columns)), own[:, groups])


def _find_block(weight: FileTensor, scales: FileTensor, block: Block | None) -> Block:
    """Infer the block of a matrix's scales from their shape. Raises WeightsError."""
    *stack, height, width = weight.shape
    whole, row = (height, width), (1, width)
    known = {(): whole, (1,): whole, (1, 1): whole, (height,): row, (height, 1): row}
    if block is not None:
        known.setdefault((-(-height // block[0]), -(-width // block[1])), block)
    depth = len(stack)
    if scales.shape[:depth] != tuple(stack) or scales.shape[depth:] not in known:
        shapes = " or ".join(str([*stack, *shape]) for shape in known)
        raise WeightsError(f"{scales.label} has shape {list(scales.shape)}, expected {shapes}")
    return known[scales.shape[depth:]]
