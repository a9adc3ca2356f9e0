"""GPTQ, as AutoGPTQ, GPTQModel, GPTQ-for-LLaMa and TGIS write it: integers of 2, 3, 4 or 8 bits.

`qweight`, int32 [num_words, out_features], is packed along the columns of the weight, and `qzeros`, int32
[num_groups, num_words], along its rows; `scales` are [num_groups, out_features]; `g_idx`, [in_features], are
the columns' groups."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.format import Tensors
from tgis.shard.checkpoint.tensors import FileTensor, WeightsError
from tgis.shard.quant.formats.grouped import (
    FLOATS,
    INTEGERS,
    WORDS,
    GroupedTensor,
    ModuleParts,
    check_shape,
    find_group,
)
from tgis.shard.quant.formats.settings import SERVED, QuantizationSettings
from tgis.shard.quant.formats.words import BITS, count_weights, count_words, read_values

# Number that is added to a stored zero: the first releases store zeros less one.
_OFFSETS = {"gptq": 1, "gptq_v2": 0}


class Gptq:
    def __init__(self, settings: QuantizationSettings):
        self._bits, self._group = settings.number("bits"), settings.number("group_size")
        form = settings.text("checkpoint_format", "gptq")
        if form not in _OFFSETS:
            settings.refuse(f"GPTQ checkpoints with checkpoint_format {form} are not served: {SERVED}")
        self._offset = _OFFSETS[form]
        self._is_fixed = not settings.get("dynamic")  # else some modules have other settings
        is_reordered = settings.flag("desc_act")
        group = self._group if self._group and self._group > 0 and not is_reordered else None
        self.layout = CodeLayout(torch.uint8, self._bits or 4, group, True, is_reordered)

    def open(self, tensors: Tensors, module: str) -> "GptqTensor | None":
        parts = ModuleParts(tensors, module, "qweight")
        if not parts:
            return None
        qweight = parts.fetch("qweight", WORDS)
        num_axes = len(qweight.shape)
        scales, qzeros = parts.fetch("scales", FLOATS, num_axes), parts.fetch("qzeros", WORDS, num_axes)
        found = {"qweight": qweight, "scales": scales, "qzeros": qzeros}
        if parts.has("g_idx"):
            found["g_idx"] = parts.fetch("g_idx", INTEGERS, num_axes - 1)
        return self._describe(found)

    def count_weights(self, name: str, shape: tuple[int, ...]) -> int | None:
        return count_weights(name, shape, "qweight", ("qzeros", "scales", "g_idx"), self._bits or 4)

    def _describe(self, parts: dict[str, FileTensor]) -> "GptqTensor":
        """Find bits and groups, which may differ from module to module, from the shapes."""
        qweight, scales, qzeros = parts["qweight"], parts["scales"], parts["qzeros"]
        if len(qweight.shape) < 2:
            raise WeightsError(f"{qweight.label} has shape {list(qweight.shape)}, expected a matrix")
        *stack, num_words, num_rows = qweight.shape
        bits = self._find_bits(qzeros, num_rows)
        num_columns = num_words * 32 // bits
        num_groups = scales.shape[-2]
        check_shape(scales, (*stack, num_groups, num_rows))
        check_shape(qzeros, (*stack, num_groups, count_words(num_rows, bits)))
        if "g_idx" in parts:
            check_shape(parts["g_idx"], (*stack, num_columns))
        group = find_group(scales, num_groups, num_columns, self._group, self._is_fixed)
        return GptqTensor(parts, (*stack, num_rows, num_columns), bits, group, offset=self._offset)

    def _find_bits(self, qzeros: FileTensor, num_rows: int) -> int:
        fitting = [bits for bits in BITS if count_words(num_rows, bits) == qzeros.shape[-1]]
        if self._bits in fitting:
            return self._bits
        if len(fitting) != 1 or (self._bits and self._is_fixed):
            said = f"the settings' {self._bits} bits" if self._bits else "2, 3, 4 or 8 bits"
            text = f"has shape {list(qzeros.shape)}, which are not zeros of {num_rows} rows in {said}"
            raise WeightsError(f"{qzeros.label} {text}")
        return fitting[0]


@dataclass(frozen=True)
class GptqTensor(GroupedTensor):
    offset: int = 0

    def _read_values(self, rows: slice, columns: slice) -> Tensor:
        qweight = self.parts["qweight"]
        return read_values(lambda words: qweight.read(words, rows).T, self.bits, columns)

    def _read_scales(self, rows: slice, groups: slice) -> Tensor:
        return self.parts["scales"].read(groups, rows).T

    def _read_zeros(self, rows: slice, groups: slice) -> Tensor:
        qzeros = self.parts["qzeros"]
        stored = read_values(lambda words: qzeros.read(groups, words), self.bits, rows)
        # A zero of 0 is stored as the largest number.
        return ((stored + self.offset) & ((1 << self.bits) - 1)).T
