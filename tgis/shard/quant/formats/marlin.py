"""Marlin, as AutoGPTQ writes it: integers of 4 bits around 8, in the order of its kernel.

`B`, int32 [in_features / 16, 2 out_features], has chunks of 16 columns and 64 rows of the weight; the values
of a chunk are permuted so that each thread of a GPU finds those that it multiplies in adjacent words. `s`,
[num_groups, out_features], are permuted likewise. The permutations are those of AutoGPTQ's
`qlinear_marlin.py`, here as axes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.format import Tensors
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.quant.formats.grouped import (
    FLOATS,
    WORDS,
    GroupedTensor,
    ModuleParts,
    check_shape,
    find_group,
)
from tgis.shard.quant.formats.settings import QuantizationSettings
from tgis.shard.quant.formats.words import count_weights, unpack

BITS, ZERO = 4, 8
ROWS, COLUMNS = 64, 16  # of a chunk
WORDS_PER_CHUNK = ROWS * COLUMNS * BITS // 32


class Marlin:
    def __init__(self, settings: QuantizationSettings):
        bits, self._group = settings.number("bits"), settings.number("group_size")
        if bits not in (None, BITS):
            settings.refuse(f"Marlin checkpoints of {bits} bits are not served, only of {BITS}")
        group = self._group if self._group and self._group > 0 else None
        self.layout = CodeLayout(torch.uint8, BITS, group, has_zeros=True)

    def open(self, tensors: Tensors, module: str) -> "MarlinTensor | None":
        parts = ModuleParts(tensors, module, "B")
        if not parts:
            return None
        words = parts.fetch("B", WORDS)
        scales = parts.fetch("s", FLOATS, len(words.shape))
        *stack, height, width = words.shape if len(words.shape) > 1 else (0, 0)
        num_rows, num_columns, num_groups = width // 2, height * COLUMNS, scales.shape[-2]
        if not width or width % WORDS_PER_CHUNK:
            expected = f"a matrix of a multiple of {WORDS_PER_CHUNK} columns"
            raise WeightsError(f"{words.label} has shape {list(words.shape)}, expected {expected}")
        check_shape(scales, (*stack, num_groups, num_rows))
        group = find_group(scales, num_groups, num_columns, self._group, is_fixed=True)
        return MarlinTensor({"B": words, "s": scales}, (*stack, num_rows, num_columns), BITS, group)

    def count_weights(self, name: str, shape: tuple[int, ...]) -> int | None:
        return count_weights(name, shape, "B", ("s",), BITS)


@dataclass(frozen=True)
class MarlinTensor(GroupedTensor):
    def _read_values(self, rows: slice, columns: slice) -> Tensor:
        first_row, first_column = rows.start // ROWS, columns.start // COLUMNS
        chunk_rows = slice(first_row * WORDS_PER_CHUNK, -(-rows.stop // ROWS) * WORDS_PER_CHUNK)
        words = self.parts["B"].read(slice(first_column, -(-columns.stop // COLUMNS)), chunk_rows)
        # A column of a chunk is 8 e + 2 b + c, and a row 16 j + 8 d + a.
        height, width = len(words), words.shape[1] // WORDS_PER_CHUNK
        # Axes: column chunk, row chunk, a, b, j, c, d, e.
        chunks = unpack(words, BITS).view(height, width, 8, 4, 4, 2, 2, 2)
        values = chunks.permute(1, 4, 6, 2, 0, 7, 3, 5).reshape(width * ROWS, height * COLUMNS)
        row, column = rows.start - first_row * ROWS, columns.start - first_column * COLUMNS
        return values[row:, column:][: rows.stop - rows.start, : columns.stop - columns.start]

    def _read_scales(self, rows: slice, groups: slice) -> Tensor:
        # A row is 8 b + a in groups, and 8 b + 2 a + c in whole columns.
        period, axes = (64, (8, 8, 1)) if self.num_groups > 1 else (32, (4, 4, 2))
        first = rows.start // period
        stored = self.parts["s"].read(groups, slice(first * period, -(-rows.stop // period) * period))
        permuted = stored.view(len(stored), stored.shape[1] // period, *axes)
        scales = permuted.transpose(2, 3).flatten(1).T  # [num_rows, num_groups]
        return scales[rows.start - first * period :][: rows.stop - rows.start]

    def _read_zeros(self, rows: slice, groups: slice) -> Tensor:
        return torch.tensor(ZERO).expand(rows.stop - rows.start, groups.stop - groups.start)
