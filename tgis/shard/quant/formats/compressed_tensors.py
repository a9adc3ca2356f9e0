"""compressed-tensors, as llm-compressor writes it.

pack-quantized: `weight_packed`, int32 [out_features, num_words], packed along the columns of the weight;
`weight_shape`; `weight_scale`, [out_features, num_groups]; optionally `weight_zero_point`, int32 [num_words,
num_groups], packed along the rows; optionally `weight_g_idx`, [in_features], the groups of the columns if
they are not adjacent. Packed values are signed integers plus half their range. int-quantized and naive:
`weight`, int8 with up to 8 bits in use, and `weight_scale` and `weight_zero_point` for each group, row or
matrix. float-quantized and naive: like the format `fp8`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.format import Tensors
from tgis.shard.checkpoint.tensors import FileTensor, StoredTensor, WeightsError
from tgis.shard.quant.formats.fp8 import E4M3, Block, open_float8
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

PACKED, PLAIN = "weight_packed", "weight"
# "dense" weights are not quantized. In "mixed-precision" each group of modules has its own format.
SERVED_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("mixed-precision", "dense"),
)


class CompressedTensors:
    def __init__(self, settings: QuantizationSettings):
        groups = list(_list_groups(settings))
        for section in (settings, settings.section("sparsity_config"), *groups):
            if (form := section.text("format", "dense")) not in SERVED_FORMATS:
                settings.refuse(f"compressed-tensors of format {form} are not served: {SERVED}")
        if settings.section("transform_config").get("config_groups"):
            settings.refuse(f"compressed-tensors with a transform_config are not served: {SERVED}")
        weights = [group.section("weights") for group in groups]
        numbers = [bits for each in weights if (bits := each.number("num_bits")) is not None]
        self._bits = [bits for bits in numbers if bits in BITS]
        # The group of a module is not known, so the widest integers of all groups are assumed.
        self._bits_of_bytes = widest if (widest := max(numbers, default=8)) in BITS else 8
        self._sizes = [size for each in weights if (size := each.group_size("group_size") or 0) > 0]
        blocks = (_find_block(each) for each in weights)
        self._block = next((block for block in blocks if block), None)
        bits = next(iter(self._bits), 4)
        columns = next(iter(self._sizes), None)
        is_float = any(each.text("type", "int") == "float" for each in weights)
        self.layout = CodeLayout(E4M3 if is_float else torch.uint8, bits, columns, has_zeros=not is_float)

    def open(self, tensors: Tensors, module: str) -> StoredTensor | None:
        parts = ModuleParts(tensors, module, PACKED)
        if parts.has(PACKED):
            return self._open_packed(parts)
        if not parts.has(PLAIN):
            return None
        if tensors.fetch_any(f"{module}.{PLAIN}").dtype == torch.int8:
            parts = ModuleParts(tensors, module, PLAIN)
            values = parts.fetch_values(torch.int8)
            return self._describe(parts, values, values.shape, self._bits_of_bytes)
        return open_float8(tensors, module, self._block)

    def count_weights(self, name: str, shape: tuple[int, ...]) -> int | None:
        return count_weights(name, shape, PACKED, ("weight_scale", "weight_zero_point"), self.layout.bits)

    def _open_packed(self, parts: ModuleParts) -> "CompressedMatrix":
        packed = parts.fetch_values(*WORDS)
        size = parts.fetch("weight_shape", INTEGERS, 1)
        shape = tuple(size.read().tolist())
        if shape[:-1] != packed.shape[:-1] or shape[-1] < 1:
            raise WeightsError(f"{size.label} is {list(shape)}, but the words are {list(packed.shape)}")
        fitting = [bits for bits in BITS if count_words(shape[-1], bits) == packed.shape[-1]]
        if not fitting:
            text = f"has shape {list(packed.shape)}, which are not {list(shape)} values of 2, 3, 4 or 8 bits"
            raise WeightsError(f"{packed.label} {text}")
        return self._describe(parts, packed, shape, next((b for b in fitting if b in self._bits), fitting[0]))

    def _describe(
        self, parts: ModuleParts, values: FileTensor, shape: tuple[int, ...], bits: int
    ) -> "CompressedMatrix":
        *stack, num_rows, num_columns = shape
        scales = parts.fetch("weight_scale", FLOATS)
        size = num_columns
        tensors_by_kind = {"values": values, "scales": scales}
        if scales.shape not in ((), (1,)):  # otherwise one scale for the matrix
            num_groups = scales.shape[-1]
            scales.check_shape(*stack, num_rows, num_groups)
            given = next((each for each in self._sizes if -(-num_columns // each) == num_groups), None)
            size = find_group_size(scales, num_groups, num_columns, given, is_fixed=False)
        if parts.has("weight_zero_point"):
            tensors_by_kind["zeros"] = _fetch_zeros(parts, scales, bits)
        if parts.has("weight_g_idx"):
            tensors_by_kind["g_idx"] = parts.fetch("weight_g_idx", INTEGERS)
            tensors_by_kind["g_idx"].check_shape(*stack, num_columns)
        is_packed = values.dtype in WORDS
        dtype, offset = (torch.uint8, 1 << (bits - 1)) if is_packed else (torch.int8, 0)
        grouping = Grouping(bits, size, dtype, is_packed or "zeros" in tensors_by_kind, offset)
        return CompressedMatrix(tensors_by_kind, shape, grouping)


class CompressedMatrix(GroupedMatrix):
    def _read_values(self, rows: range, columns: range) -> Tensor:
        if self.grouping.dtype == torch.int8:
            values = self.read_part("values", rows, columns)
            self._check_range(values)
            return values
        return read_values(lambda words: self.read_part("values", rows, words), self.bits, columns)

    def _check_range(self, values: Tensor) -> None:
        """Raise WeightsError if an integer exceeds the bits in the settings, because products drop higher
        bits."""
        largest = (1 << (self.bits - 1)) - 1
        if values.numel():
            for bound in map(int, values.aminmax()):
                if not -largest - 1 <= bound <= largest:
                    raise WeightsError(
                        f"{self.label} has {bound}, which is not a signed integer of {self.bits} bits"
                    )

    def _read_scales(self, rows: range, groups: range) -> Tensor:
        return self._read_groups("scales", rows, groups)

    def _read_zeros(self, rows: range, groups: range) -> Tensor:
        if "zeros" not in self.parts:
            return torch.tensor(self.grouping.offset).expand(len(rows), len(groups))
        if self.parts["zeros"].dtype in WORDS:
            return read_values(lambda words: self.read_part("zeros", words, groups).T, self.bits, rows).T
        return self._read_groups("zeros", rows, groups).int() + self.grouping.offset

    def _read_groups(self, end: str, rows: range, groups: range) -> Tensor:
        """Return a number for each row and group. The tensor may hold one number for all."""
        stored = self.parts[end]
        if len(stored.shape) < 2:
            return stored.read().flatten().expand(len(rows), len(groups))
        return self.read_part(end, rows, groups)


def _list_groups(settings: QuantizationSettings) -> Iterator[QuantizationSettings]:
    """Yield the settings of each group of modules."""
    groups = settings.section("config_groups")
    return (groups.section(name) for name in groups)


def _find_block(weights: QuantizationSettings) -> Block | None:
    """Return the rows and columns that share a scale, or None if rows or the matrix do. Raises
    WeightsError."""
    columns = weights.group_size("group_size") or 0
    return weights.pair("block_structure") or ((1, columns) if columns > 0 else None)


def _fetch_zeros(parts: ModuleParts, scales: FileTensor, bits: int) -> FileTensor:
    zeros = parts.fetch("weight_zero_point", (torch.int8, *WORDS))
    shape = scales.shape
    if zeros.dtype in WORDS and len(shape) > 1:  # packed along the rows
        shape = (*shape[:-2], count_words(shape[-2], bits), shape[-1])
    zeros.check_shape(*shape)
    return zeros
