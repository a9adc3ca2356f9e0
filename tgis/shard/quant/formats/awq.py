"""AWQ as AutoAWQ writes it: 4-bit integers.

gemm: `qweight`, int32 [in_features, num_words], `qzeros`, int32 [num_groups, num_words], and `scales`
[num_groups, out_features] are packed along the rows of the weight, in the order of its kernel.
gemv: `qweight`, int32 [out_features, num_words], `qzeros`, int32 [out_features, num_words], and `scales`
[out_features, 8 num_words] are packed along the columns in ascending order, with padding after the last
group."""

from collections.abc import Callable

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.format import Tensors
from tgis.shard.checkpoint.tensors import FileTensor, WeightsError
from tgis.shard.quant.formats.grouped import (
    FLOATS,
    WORDS,
    GroupedMatrix,
    Grouping,
    ModuleParts,
    find_group_size,
)
from tgis.shard.quant.formats.settings import SERVED, QuantizationSettings
from tgis.shard.quant.formats.words import count_weights, read_values

BITS, PER_WORD = 4, 8
# Positions of the eight values of a word.
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)

Parts = dict[str, FileTensor]


class Awq:
    def __init__(self, settings: QuantizationSettings):
        bits = settings.number("bits", "w_bit")
        self._size = settings.group_size("group_size", "q_group_size")
        if bits not in (None, BITS):
            settings.refuse(f"AWQ checkpoints of {bits} bits are not served, only of {BITS}")
        version, backend = settings.text("version", "gemm"), settings.text("backend", "autoawq")
        named = backend if backend == "llm-awq" else version
        if named not in _VERSIONS:
            settings.refuse(f"AWQ checkpoints of version {named} are not served: {SERVED}")
        self._describe = _VERSIONS[version]
        self.layout = CodeLayout(torch.uint8, BITS, self._size if (self._size or 0) > 0 else None, True)

    def open(self, tensors: Tensors, module: str) -> GroupedMatrix | None:
        parts = ModuleParts(tensors, module, "qweight")
        if not parts.has("qweight"):
            return None
        tensors_by_end = {"qweight": parts.fetch_values(*WORDS)}
        num_axes = len(tensors_by_end["qweight"].shape)
        tensors_by_end |= {end: parts.fetch(end, types, num_axes) for end, types in _OTHERS.items()}
        return self._describe(tensors_by_end, self._size)

    def count_weights(self, name: str, shape: tuple[int, ...]) -> int | None:
        return count_weights(name, shape, "qweight", tuple(_OTHERS), BITS)


_OTHERS = {"scales": FLOATS, "qzeros": WORDS}


def _describe_gemm(parts: Parts, size: int | None) -> GroupedMatrix:
    scales = parts["scales"]
    *stack, num_columns, num_words = parts["qweight"].shape
    num_groups = scales.shape[-2]
    num_rows = num_words * PER_WORD
    scales.check_shape(*stack, num_groups, num_rows)
    parts["qzeros"].check_shape(*stack, num_groups, num_words)
    size = find_group_size(scales, num_groups, num_columns, size, is_fixed=True)
    return AwqGemmMatrix(parts, (*stack, num_rows, num_columns), Grouping(BITS, size))


def _describe_gemv(parts: Parts, size: int | None) -> GroupedMatrix:
    scales = parts["scales"]
    *stack, num_rows, num_words = parts["qweight"].shape
    num_columns = num_words * PER_WORD
    room = scales.shape[-1]
    scales.check_shape(*stack, num_rows, room)
    parts["qzeros"].check_shape(*stack, num_rows, -(-room // PER_WORD))
    # The number of groups is unknown because of the padding.
    size = size if size and size > 0 else num_columns
    if room < -(-num_columns // size):
        text = f"has room for {room} groups, but {num_columns} columns are in groups of {size}"
        raise WeightsError(f"{scales.label} {text} by the checkpoint's settings")
    return AwqGemvMatrix(parts, (*stack, num_rows, num_columns), Grouping(BITS, size))


class AwqGemmMatrix(GroupedMatrix):
    def _read_values(self, rows: range, columns: range) -> Tensor:
        return read_values(lambda words: self.read_part("qweight", columns, words), BITS, rows, ORDER).T

    def _read_scales(self, rows: range, groups: range) -> Tensor:
        return self.read_part("scales", groups, rows).T

    def _read_zeros(self, rows: range, groups: range) -> Tensor:
        return read_values(lambda words: self.read_part("qzeros", groups, words), BITS, rows, ORDER).T


class AwqGemvMatrix(GroupedMatrix):
    def _read_values(self, rows: range, columns: range) -> Tensor:
        return read_values(lambda words: self.read_part("qweight", rows, words), BITS, columns)

    def _read_scales(self, rows: range, groups: range) -> Tensor:
        return self.read_part("scales", rows, groups)

    def _read_zeros(self, rows: range, groups: range) -> Tensor:
        return read_values(lambda words: self.read_part("qzeros", rows, words), BITS, groups)


# "exllama" and "ipex" are kernels that read the layout of gemm.
_VERSIONS: dict[str, Callable[[Parts, int | None], GroupedMatrix]] = {
    "gemm": _describe_gemm,
    "exllama": _describe_gemm,
    "ipex": _describe_gemm,
    "gemv": _describe_gemv,
}
