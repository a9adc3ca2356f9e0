"""GPTQ as AutoGPTQ, GPTQModel, GPTQ-for-LLaMa and TGIS write it: integers of 2, 3, 4 or 8 bits.

`qweight`, int32 [num_words, out_features], is packed along the columns of the weight; `qzeros`, int32
[num_groups, num_words], along its rows; `scales`, [num_groups, out_features]; `g_idx`, [in_features], has the
group of each column."""

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.format import Tensors
from tgis.shard.checkpoint.tensors import FileTensor, WeightsError
from tgis.shard.quant.formats.grouped import (
    FLOATS,
    INTEGERS,
    WORDS,
    GroupedMatrix,
    Grouping,
    ModuleParts,
    find_group_size,
)
from tgis.shard.quant.formats.settings import SERVED, QuantizationSettings
from tgis.shard.quant.formats.words import BITS, count_weights, count_words, read_values

# Offset of stored zeros: the first version stores zeros minus one.
_OFFSETS = {"gptq": 1, "gptq_v2": 0}


class Gptq:
    def __init__(self, settings: QuantizationSettings):
        self._bits = settings.number("bits")
        self._size = settings.group_size("group_size")
        if self._bits not in (None, *BITS):
            settings.refuse(f"bits {self._bits} is not 2, 3, 4 or 8")
        version = settings.text("checkpoint_format", "gptq")
        if version not in _OFFSETS:
            settings.refuse(f"GPTQ checkpoints with checkpoint_format {version} are not served: {SERVED}")
        self._offset = _OFFSETS[version]
        self._is_fixed = not settings.get("dynamic")  # otherwise modules may differ in bits and group size
        is_reordered = settings.flag("desc_act")
        size = self._size if self._size and self._size > 0 and not is_reordered else None
        self.layout = CodeLayout(torch.uint8, self._bits or 4, size, True, is_reordered)

    def open(self, tensors: Tensors, module: str) -> "GptqMatrix | None":
        parts = ModuleParts(tensors, module, "qweight")
        if not parts.has("qweight"):
            return None
        qweight = parts.fetch_values(*WORDS)
        num_axes = len(qweight.shape)
        scales, qzeros = parts.fetch("scales", FLOATS, num_axes), parts.fetch("qzeros", WORDS, num_axes)
        tensors_by_end = {"qweight": qweight, "scales": scales, "qzeros": qzeros}
        if parts.has("g_idx"):
            tensors_by_end["g_idx"] = parts.fetch("g_idx", INTEGERS)
        return self._describe(tensors_by_end)

    def count_weights(self, name: str, shape: tuple[int, ...]) -> int | None:
        return count_weights(name, shape, "qweight", ("qzeros", "scales", "g_idx"), self._bits or 4)

    def _describe(self, parts: dict[str, FileTensor]) -> "GptqMatrix":
        """Infer bits and groups, which may differ between modules, from the shapes."""
        *stack, num_words, num_rows = parts["qweight"].shape
        bits = self._find_bits(parts["qzeros"], num_rows)
        scales = parts["scales"]
        num_columns = num_words * 32 // bits
        num_groups = scales.shape[-2]
        scales.check_shape(*stack, num_groups, num_rows)
        parts["qzeros"].check_shape(*stack, num_groups, count_words(num_rows, bits))
        if "g_idx" in parts:
            parts["g_idx"].check_shape(*stack, num_columns)
        size = find_group_size(scales, num_groups, num_columns, self._size, self._is_fixed)
        return GptqMatrix(parts, (*stack, num_rows, num_columns), Grouping(bits, size, offset=self._offset))

    def _find_bits(self, qzeros: FileTensor, num_rows: int) -> int:
        fitting = [bits for bits in BITS if count_words(num_rows, bits) == qzeros.shape[-1]]
        if self._bits in fitting:
            return self._bits
        if len(fitting) != 1 or (self._bits and self._is_fixed):
            bits = f"{self._bits} bits by the checkpoint's settings" if self._bits else "2, 3, 4 or 8 bits"
            text = f"has shape {list(qzeros.shape)}, but zeros of {num_rows} rows are in {bits}"
            raise WeightsError(f"{qzeros.label} {text}")
        return fitting[0]


class GptqMatrix(GroupedMatrix):
    def _read_values(self, rows: range, columns: range) -> Tensor:
        return read_values(lambda words: self.read_part("qweight", words, rows).T, self.bits, columns)

    def _read_scales(self, rows: range, groups: range) -> Tensor:
        return self.read_part("scales", groups, rows).T

    def _read_zeros(self, rows: range, groups: range) -> Tensor:
        stored = read_values(lambda words: self.read_part("qzeros", groups, words), self.bits, rows)
        # The first version stores zero 0 as -1, which wraps around to the largest value.
        return ((stored + self.grouping.offset) & ((1 << self.bits) - 1)).T
