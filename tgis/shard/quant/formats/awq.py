"""AWQ, as AutoAWQ writes it: integers of 4 bits.

gemm: `qweight`, int32 [in_features, num_words], `qzeros`, int32 [num_groups, num_words], and `scales`
[num_groups, out_features] are packed along the rows of the weight, in the order of its kernel.
gemv: `qweight`, int32 [out_features, num_words], `qzeros`, int32 [out_features, num_words], and `scales`
[out_features, 8 num_words] are packed along the columns in their order, with padding after the last group."""

from typing import Protocol

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.format import Tensors
from tgis.shard.checkpoint.tensors import FileTensor, WeightsError
from tgis.shard.quant.formats.grouped import (
    FLOATS,
    WORDS,
    GroupedTensor,
    ModuleParts,
    check_shape,
    find_group,
)
from tgis.shard.quant.formats.settings import SERVED, QuantizationSettings
from tgis.shard.quant.formats.words import count_weights, read_values

BITS, PER_WORD = 4, 8
# Places of a word in which its eight values are.
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq:
    def __init__(self, settings: QuantizationSettings):
        bits, self._group = settings.number("bits", "w_bit"), settings.number("group_size", "q_group_size")
        if bits not in (None, BITS):
            settings.refuse(f"AWQ checkpoints of {bits} bits are not served, only of {BITS}")
        version, backend = settings.text("version", "gemm"), settings.text("backend", "autoawq")
        if version not in _VERSIONS or backend == "llm-awq":
            named = backend if backend == "llm-awq" else version
            settings.refuse(f"AWQ checkpoints of version {named} are not served: {SERVED}")
        self._open = _VERSIONS[version]
        group = self._group if self._group and self._group > 0 else None
        self.layout = CodeLayout(torch.uint8, BITS, group, has_zeros=True)

    def open(self, tensors: Tensors, module: str) -> GroupedTensor | None:
        parts = ModuleParts(tensors, module, "qweight")
        return self._open(parts, self._group) if parts else None

    def count_weights(self, name: str, shape: tuple[int, ...]) -> int | None:
        return count_weights(name, shape, "qweight", ("qzeros", "scales"), BITS)


class _Open(Protocol):
    def __call__(self, parts: ModuleParts, group: int | None) -> GroupedTensor: ...


def _open_gemm(parts: ModuleParts, group: int | None) -> GroupedTensor:
    found = _fetch(parts)
    *stack, num_columns, num_words = found["qweight"].shape
    scales, num_rows = found["scales"], num_words * PER_WORD
    num_groups = scales.shape[-2]
    check_shape(scales, (*stack, num_groups, num_rows))
    check_shape(found["qzeros"], (*stack, num_groups, num_words))
    group = find_group(scales, num_groups, num_columns, group, is_fixed=True)
    return AwqGemmTensor(found, (*stack, num_rows, num_columns), BITS, group)


def _open_gemv(parts: ModuleParts, group: int | None) -> GroupedTensor:
    found = _fetch(parts)
    *stack, num_rows, num_words = found["qweight"].shape
    num_columns, width = num_words * PER_WORD, found["qzeros"].shape[-1]
    check_shape(found["qzeros"], (*stack, num_rows, width))
    check_shape(found["scales"], (*stack, num_rows, width * PER_WORD))
    # The padding hides the number of groups.
    group = num_columns if group is None or group <= 0 else group
    if -(-num_columns // group) > width * PER_WORD:
        text = f"has room for {width * PER_WORD} groups, but {num_columns} columns are in groups of {group}"
        raise WeightsError(f"{found['scales'].label} {text} by the checkpoint's settings")
    return AwqGemvTensor(found, (*stack, num_rows, num_columns), BITS, group)


def _fetch(parts: ModuleParts) -> dict[str, FileTensor]:
    qweight = parts.fetch("qweight", WORDS)
    num_axes = max(len(qweight.shape), 2)
    others = {"qzeros": WORDS, "scales": FLOATS}
    return {"qweight": parts.fetch("qweight", WORDS, num_axes)} | {
        end: parts.fetch(end, dtypes, num_axes) for end, dtypes in others.items()
    }


class AwqGemmTensor(GroupedTensor):
    def _read_values(self, rows: slice, columns: slice) -> Tensor:
        qweight = self.parts["qweight"]
        return read_values(lambda words: qweight.read(columns, words), self.bits, rows, ORDER).T

    def _read_scales(self, rows: slice, groups: slice) -> Tensor:
        return self.parts["scales"].read(groups, rows).T

    def _read_zeros(self, rows: slice, groups: slice) -> Tensor:
        qzeros = self.parts["qzeros"]
        return read_values(lambda words: qzeros.read(groups, words), self.bits, rows, ORDER).T


class AwqGemvTensor(GroupedTensor):
    def _read_values(self, rows: slice, columns: slice) -> Tensor:
        qweight = self.parts["qweight"]
        return read_values(lambda words: qweight.read(rows, words), self.bits, columns)

    def _read_scales(self, rows: slice, groups: slice) -> Tensor:
        return self.parts["scales"].read(rows, groups)

    def _read_zeros(self, rows: slice, groups: slice) -> Tensor:
        qzeros = self.parts["qzeros"]
        return read_values(lambda words: qzeros.read(rows, words), self.bits, groups)


_VERSIONS: dict[str, _Open] = {
    "gemm": _open_gemm,
    "exllama": _open_gemm,
    "ipex": _open_gemm,
    "gemv": _open_gemv,
}
