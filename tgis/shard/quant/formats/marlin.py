"""Marlin as AutoGPTQ writes it: 4-bit integers with zero 8, in the order of its kernel.

`B`, int32 [in_features / 16, 2 out_features], has chunks of 16 columns and 64 rows of the weight. The values
of a chunk are permuted so that the operands of each GPU thread are in adjacent words. `s`, [num_groups,
out_features], is permuted similarly. AutoGPTQ's `qlinear_marlin.py` defines the permutations, which are
permutations of axes here."""

from math import prod

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.format import Tensors
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.quant.formats.grouped import (
    FLOATS,
    WORDS,
    GroupedMatrix,
    Grouping,
    ModuleParts,
    find_group_size,
)
from tgis.shard.quant.formats.settings import QuantizationSettings
from tgis.shard.quant.formats.words import count_weights, unpack

BITS, ZERO = 4, 8
ROWS, COLUMNS = 64, 16  # size of a chunk
WORDS_PER_CHUNK = ROWS * COLUMNS * BITS // 32


class Marlin:
    def __init__(self, settings: QuantizationSettings):
        bits = settings.number("bits")
        self._size = settings.group_size("group_size")
        if bits not in (None, BITS):
            settings.refuse(f"Marlin checkpoints of {bits} bits are not served, only of {BITS}")
        self.layout = CodeLayout(torch.uint8, BITS, self._size if (self._size or 0) > 0 else None, True)

    def open(self, tensors: Tensors, module: str) -> "MarlinMatrix | None":
        parts = ModuleParts(tensors, module, "B")
        if not parts.has("B"):
            return None
        words = parts.fetch_values(*WORDS)
        scales = parts.fetch("s", FLOATS, len(words.shape))
        *stack, height, width = words.shape
        if width % WORDS_PER_CHUNK:
            expected = f"a multiple of {WORDS_PER_CHUNK} columns"
            raise WeightsError(f"{words.label} has shape {list(words.shape)}, expected {expected}")
        num_rows = width // 2
        num_columns = height * COLUMNS
        num_groups = scales.shape[-2]
        scales.check_shape(*stack, num_groups, num_rows)
        size = find_group_size(scales, num_groups, num_columns, self._size, is_fixed=True)
        return MarlinMatrix({"B": words, "s": scales}, (*stack, num_rows, num_columns), Grouping(BITS, size))

    def count_weights(self, name: str, shape: tuple[int, ...]) -> int | None:
        return count_weights(name, shape, "B", ("s",), BITS)


class MarlinMatrix(GroupedMatrix):
    def _read_values(self, rows: range, columns: range) -> Tensor:
        across, along = _widen(rows, ROWS), _widen(columns, COLUMNS)
        chunk_rows, chunk_columns = len(across) // ROWS, len(along) // COLUMNS
        in_words = range(across.start * 2, across.stop * 2)
        words = self.read_part("B", range(along.start // COLUMNS, along.stop // COLUMNS), in_words)
        # Column 8 e + 2 b + c and row 16 j + 8 d + a of a chunk are at index (a, b, j, c, d, e).
        chunks = unpack(words, BITS).view(chunk_columns, chunk_rows, 8, 4, 4, 2, 2, 2)
        values = chunks.permute(1, 4, 6, 2, 0, 7, 3, 5).reshape(len(across), len(along))
        return values[rows.start - across.start :, columns.start - along.start :][: len(rows), : len(columns)]

    def _read_scales(self, rows: range, groups: range) -> Tensor:
        # With groups, row 8 b + a is at index (a, b); without, row 8 b + 2 a + c is at (a, b, c).
        axes = (8, 8, 1) if self.num_groups > 1 else (4, 4, 2)
        whole = _widen(rows, prod(axes))
        stored = self.read_part("s", groups, whole)
        permuted = stored.view(len(groups), len(whole) // prod(axes), *axes).transpose(2, 3)
        return permuted.flatten(1).T[rows.start - whole.start :][: len(rows)]

    def _read_zeros(self, rows: range, groups: range) -> Tensor:
        return torch.tensor(ZERO).expand(len(rows), len(groups))


def _widen(part: range, multiple: int) -> range:
    """Return the smallest range with bounds at multiples of `multiple` that contains `part`."""
    return range(part.start // multiple * multiple, -(-part.stop // multiple) * multiple)
