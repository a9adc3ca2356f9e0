"""compressed-tensors, as llm-compressor writes it.

pack-quantized: `weight_packed`, int32 [out_features, num_words], along the columns of the weight, and
`weight_shape`; `weight_scale` [out_features, num_groups]; `weight_zero_point`, int32 [num_words, num_groups],
along the rows, if the zeros are not all the same; `weight_g_idx`, [in_features], if the groups are not those
of adjacent columns. Packed integers are signed ones plus half their range.
int-quantized and naive: `weight`, int8, and `weight_scale` and `weight_zero_point` for each group, row or
matrix."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.format import Tensors
from tgis.shard.checkpoint.tensors import FileTensor, StoredTensor, WeightsError
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

PACKED, PLAIN = "weight_packed", "weight"
# "dense" leaves weights unquantized, and in "mixed-precision" each group of modules has a format of its own.
FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("mixed-precision", "dense"),
)
# Tensors of quantized activations, which are not quantized here, and a shape that `open` reads.
_OTHERS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "weight_shape")


class CompressedTensors:
    def __init__(self, settings: QuantizationSettings):
        for section in (settings, settings.section("sparsity_config"), *_list_groups(settings)):
            if (form := section.text("format", "dense")) not in FORMATS:
                settings.refuse(f"compressed-tensors of format {form} are not served: {SERVED}")
        if settings.section("transform_config").get("config_groups"):
            settings.refuse(f"compressed-tensors with a transform_config are not served: {SERVED}")
        weights = [each.section("weights") for each in _list_groups(settings)]
        self._bits = [bits for each in weights if (bits := each.number("num_bits"))]
        self._groups = [size for each in weights if (size := each.number("group_size") or 0) > 0]
        group = self._groups[0] if self._groups else None
        self.layout = CodeLayout(torch.uint8, self._get_bits(), group, has_zeros=True)

    def open(self, tensors: Tensors, module: str) -> StoredTensor | None:
        parts = ModuleParts(tensors, module, PACKED)
        if parts:
            found = self._open_packed(parts)
        elif (parts := ModuleParts(tensors, module, PLAIN)) and parts.has("weight_scale"):
            found = self._open_plain(parts)
        else:
            return None
        for end in _OTHERS:
            if parts.has(end):
                tensors.fetch_any(f"{module}.{end}")  # so that it counts as read
        return found

    def count_weights(self, name: str, shape: tuple[int, ...]) -> int | None:
        others = ("weight_scale", "weight_zero_point")
        return count_weights(name, shape, PACKED, others, self._get_bits())

    def _get_bits(self) -> int:
        return self._bits[0] if self._bits else 4

    def _open_packed(self, parts: ModuleParts) -> "CompressedTensor":
        packed = parts.fetch(PACKED, WORDS)
        size = parts.fetch("weight_shape", INTEGERS, 1)
        shape = tuple(size.read().tolist())
        if len(shape) < 2 or shape[:-1] != packed.shape[:-1] or shape[-1] < 1:
            raise WeightsError(f"{size.label} says {list(shape)}, but the words are {list(packed.shape)}")
        fitting = [bits for bits in BITS if count_words(shape[-1], bits) == packed.shape[-1]]
        fitting = [bits for bits in fitting if bits in self._bits] or fitting
        if not fitting:
            text = f"has shape {list(packed.shape)}, which is not that of {list(shape)} in 2, 3, 4 or 8 bits"
            raise WeightsError(f"{packed.label} {text}")
        return self._describe(parts, packed, shape, fitting[0])

    def _open_plain(self, parts: ModuleParts) -> "CompressedTensor":
        weight = parts.fetch(PLAIN, (torch.int8,))
        return self._describe(parts, weight, weight.shape, 8)

    def _describe(
        self, parts: ModuleParts, weight: FileTensor, shape: tuple[int, ...], bits: int
    ) -> "CompressedTensor":
        *stack, num_rows, num_columns = shape if len(shape) > 1 else (0, 0)
        scales, group = parts.fetch("weight_scale", FLOATS), num_columns
        found = {"weight": weight, "scales": scales}
        if scales.shape not in ((), (1,)):  # one scale for all
            num_groups = scales.shape[-1]
            check_shape(scales, (*stack, num_rows, num_groups))
            said = next((each for each in self._groups if -(-num_columns // each) == num_groups), None)
            group = find_group(scales, num_groups, num_columns, said, is_fixed=False)
        if parts.has("weight_zero_point"):
            found["zeros"] = self._fetch_zeros(parts, scales, bits)
        if parts.has("weight_g_idx"):
            found["g_idx"] = parts.fetch("weight_g_idx", INTEGERS)
            check_shape(found["g_idx"], (*stack, num_columns))
        if weight.dtype == torch.int8:
            return CompressedTensor(found, shape, bits, group, torch.int8, "zeros" in found)
        return CompressedTensor(found, shape, bits, group)

    def _fetch_zeros(self, parts: ModuleParts, scales: FileTensor, bits: int) -> FileTensor:
        zeros = parts.fetch("weight_zero_point", (torch.int8, torch.int32))
        shape = scales.shape
        if zeros.dtype in WORDS:
            *stack, num_rows, num_groups = shape if len(shape) > 1 else (0, 0)
            shape = (*stack, count_words(num_rows, bits), num_groups)
        check_shape(zeros, shape)
        return zeros


def _list_groups(settings: QuantizationSettings) -> Iterator[QuantizationSettings]:
    groups = settings.section("config_groups")
    return (groups.section(name) for name in groups)


@dataclass(frozen=True)
class CompressedTensor(GroupedTensor):
    @property
    def _offset(self) -> int:
        return 0 if self.dtype == torch.int8 else 1 << (self.bits - 1)

    def _read_values(self, rows: slice, columns: slice) -> Tensor:
        weight = self.parts["weight"]
        if self.dtype == torch.int8:
            return weight.read(rows, columns)
        return read_values(lambda words: weight.read(rows, words), self.bits, columns)

    def _read_scales(self, rows: slice, groups: slice) -> Tensor:
        return _read_groups(self.parts["scales"], rows, groups)

    def _read_zeros(self, rows: slice, groups: slice) -> Tensor:
        if "zeros" not in self.parts:
            return torch.tensor(self._offset).expand(rows.stop - rows.start, groups.stop - groups.start)
        zeros = self.parts["zeros"]
        if zeros.dtype in WORDS:
            return read_values(lambda words: zeros.read(words, groups).T, self.bits, rows).T
        return _read_groups(zeros, rows, groups).int() + self._offset


def _read_groups(stored: FileTensor, rows: slice, groups: slice) -> Tensor:
    """Return a number for each row and group, of which there may be only one."""
    if len(stored.shape) < 2:
        return stored.read().flatten().expand(rows.stop - rows.start, groups.stop - groups.start)
    return stored.read(rows, groups)
