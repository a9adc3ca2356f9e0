"""Tensors of a GGUF file. Their parts can be read dequantized or as codes."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.gguf.codes import CODINGS
from tgis.shard.checkpoint.tensors import (
    ALL,
    FloatsOnly,
    ReorderedRows,
    StackedRows,
    Stored,
    Transposed,
    WeightsError,
)
from tgis.tensor_files.gguf_types import GgufType

PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PIECE_ELEMENTS = 1 << 20  # the library's dequantization needs about ten times as many bytes

Bytes = NDArray[np.uint8]


class GgufTensor:
    """Vector or matrix of a file. `get_rows` returns the bytes of its rows in mapped memory, [num_rows,
    row_bytes]. For every part that is read, `count` is called with the label, the tensor's bytes and the
    part's bytes. `order` has the file's row number for each row."""

    def __init__(
        self,
        get_rows: Callable[[], Bytes],
        shape: tuple[int, ...],
        type: GgufType,
        label: str,
        count: Callable[[str, int, int], None],
        order: NDArray[np.int64] | None = None,
        added: float = 0.0,
    ):
        self.shape = shape
        self.label = label
        self._get_rows = get_rows
        self._type = type
        self._count = count
        self._order = order
        self._added = added
        self._coding = CODINGS.get(type.name)

    def layout(self, columns: slice = ALL) -> CodeLayout | None:
        if self._coding is None or len(self.shape) == 1:
            return None
        requested = range(self.shape[1])[columns]
        group = self._coding.layout.group
        assert group is not None
        splits_group = requested.start % group or requested.stop % group
        return None if splits_group else self._coding.cut_layout(requested.start)

    def codes(self, rows: slice = ALL, columns: slice = ALL) -> Codes:
        assert self._coding is not None
        blocks, offset = self._take_blocks(rows, columns)
        requested = range(self.shape[1])[columns]
        whole = blocks.reshape(len(blocks), -1, self._type.block_bytes)
        return self._coding.make_codes(whole, range(offset, offset + len(requested)))

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Return the part, dequantized to float32 if it is stored as codes."""
        if len(self.shape) == 1:  # a vector is one row of the file; `order` and `rows` select its elements
            vector = self._read_rows(ALL, ALL)[0]
            ordered = vector if self._order is None else vector[torch.from_numpy(self._order)]
            return ordered[rows].contiguous()
        return self._read_rows(rows, columns)

    def entry(self, index: int) -> Stored:
        raise WeightsError(f"{self.label} has shape {list(self.shape)}, no entry {index}")

    def _read_rows(self, rows: slice, columns: slice) -> Tensor:
        blocks, offset = self._take_blocks(rows, columns)
        width = len(range(self.shape[-1])[columns])
        result = torch.empty(len(blocks), width, dtype=PLAIN_TYPES.get(self._type.name, torch.float32))
        for part in _pieces(len(blocks), offset + width):
            result[part] = _widen(blocks[part], self._type)[:, offset : offset + width]
        if self._added:
            result -= self._added
        return result

    def _take_blocks(self, rows: slice, columns: slice) -> tuple[Bytes, int]:
        """Return the bytes of all blocks that overlap the columns, [num_rows, num_bytes], and the offset of
        the first requested column in them."""
        stored = self._get_rows()
        requested = range(self.shape[-1])[columns]
        size = self._type.block_elements
        num_bytes = self._type.block_bytes
        first = requested.start // size
        last = -(-requested.stop // size)
        blocks = stored[:, first * num_bytes : last * num_bytes]
        order = self._order if len(self.shape) > 1 else None
        blocks = blocks[rows if order is None else order[rows]]
        self._count(self.label, stored.size, blocks.size)
        return blocks, requested.start - first * size


class GgufStack(FloatsOnly):
    """Stack of one matrix per expert, each joined by rows from one or more tensors. The index of every
    requested entry is added to `taken`."""

    def __init__(self, tensors: Sequence[Sequence[GgufTensor]], label: str, taken: set[int]):
        self._entries = [StackedRows(parts, label) for parts in zip(*tensors, strict=True)]
        self.label = label
        self._taken = taken
        self.shape = (len(self._entries), *self._entries[0].shape)

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        return torch.stack([each.read(columns) for each in self._entries[rows]])

    def entry(self, index: int) -> Stored:
        if index >= len(self._entries):
            raise WeightsError(f"{self.label} has shape {list(self.shape)}, no entry {index}")
        self._taken.add(index)
        return self._entries[index]


class GgufExperts(FloatsOnly):
    """Stack of one matrix per expert, which the checkpoint stores transposed, or of one bias per expert. Each
    is joined by rows from one or more tensors, whose rows alternate if the stack `is_interleaved`. The index
    of every requested entry is added to `taken`."""

    def __init__(
        self, experts: Sequence[Sequence[GgufTensor]], label: str, taken: set[int], is_interleaved: bool
    ):
        self._entries = [_join_expert(parts, label, is_interleaved) for parts in experts]
        self.label = label
        self._taken = taken
        self.shape = (len(self._entries), *self._entries[0].shape)

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        return torch.stack([each.read(columns) for each in self._entries[rows]])

    def entry(self, index: int) -> Stored:
        if index >= len(self._entries):
            raise WeightsError(f"{self.label} has shape {list(self.shape)}, no entry {index}")
        self._taken.add(index)
        return self._entries[index]


def _join_expert(parts: Sequence[GgufTensor], label: str, is_interleaved: bool) -> Stored:
    joined: Stored = StackedRows(parts, label)
    if is_interleaved:
        order = torch.arange(joined.shape[0]).view(len(parts), -1).T.flatten()
        joined = ReorderedRows(joined, order)
    return Transposed(joined) if len(joined.shape) > 1 else joined


def _widen(blocks: Bytes, type: GgufType) -> Tensor:
    """Return the elements of whole blocks, [num_rows, num_columns], dequantized to float32."""
    if type.name in PLAIN_TYPES:
        return torch.from_numpy(np.ascontiguousarray(blocks)).view(PLAIN_TYPES[type.name])
    import gguf  # only here, because types that are kept as codes do not need it

    widened = gguf.dequantize(np.ascontiguousarray(blocks), gguf.GGMLQuantizationType[type.name])
    return torch.from_numpy(widened)


def _pieces(num_rows: int, width: int) -> Iterator[slice]:
    step = max(1, PIECE_ELEMENTS // max(1, width))
    for first in range(0, num_rows, step):
        yield slice(first, first + step)
