"""Plan of a step's attention on the CPU: tiles of queries, slots of new keys, and a table with both."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tgis.shard.attention.interface import StepLayout

QUERY_TILE = 32  # maximum tokens of a tile of queries, all of one sequence
# Number of keys of a segment, a multiple of a span. Results depend on it, because the softmax of a row is
# computed for each segment and merged in the order of segments.
SEGMENT_LEN = 1024
# The segments of tiles with at most this many tokens are separate units of work. Larger tiles provide enough
# units, and the partial results of their segments would need much memory.
MAX_SPLIT_TOKENS = 8
# Tiles with a smaller share of a step's keys are not split, because the work is balanced without it.
LEAST_SPLIT_SHARE = 1 / 16

_NO_PARTIALS = np.empty(0, np.float32)


class CpuPlan:
    """Data of a step for the compiled kernels, which read it through `table`.

    items: int32 [num_items, 7], the work for each KV head. Columns: sequence, index of the tile's first token
    in the step, number of tokens, position of the first token, number of items into which the tile is split
    by segments (1: not split), number of this item among them, and index of the tile's first partial result.
    The most expensive items come first, so that threads finish together.

    table: int64 [11]: the numbers of tokens, sequences, entries of a block table, and items; the maximum
    number of tokens of a tile; the addresses of seq_lens, block_tables, items and slots; the length of a
    segment; the address of the partial results."""

    def __init__(self, layout: StepLayout, block_size: int, is_cross: bool):
        items, self._num_partials = _plan_items(layout, is_cross)
        self.items = torch.from_numpy(items)
        self.slots = torch.empty(0, dtype=torch.int64) if is_cross else layout.find_slots(block_size)
        block_tables = layout.block_tables.contiguous()
        # Keeps the memory alive to which the table's addresses point.
        self._tensors = (layout.seq_lens.contiguous(), block_tables, self.items, self.slots)
        self._partials = _NO_PARTIALS
        self._partial_size = 0
        self.table = self._make_table(layout)

    def copy_into(self, fixed: "CpuPlan") -> None:
        fixed.table.copy_(self.table)
        fixed._tensors = self._tensors
        fixed._num_partials = self._num_partials
        fixed._allocate_partials()

    def reserve_partials(self, size: int) -> None:
        """Allocate memory for partial results of `size` float32 each."""
        if size > self._partial_size:
            self._partial_size = size
            self._allocate_partials()

    def _allocate_partials(self) -> None:
        # The results include counters, which start at zero and which every kernel resets to zero.
        if self._num_partials:
            self._partials = np.zeros(self._num_partials * self._partial_size, np.float32)
            self.table.numpy()[10] = self._partials.ctypes.data

    def _make_table(self, layout: StepLayout) -> Tensor:
        addresses = [x.data_ptr() for x in self._tensors]
        num_seqs, max_blocks = layout.block_tables.shape
        num_tokens = int(layout.cu_seqlens_q.numpy()[-1])
        num_items = len(self.items)
        max_tile = 1 if num_tokens == num_seqs == num_items else QUERY_TILE
        table = (num_tokens, num_seqs, max_blocks, num_items, max_tile, *addresses, SEGMENT_LEN, 0)
        return torch.from_numpy(np.array(table, np.int64))


def _plan_items(layout: StepLayout, is_cross: bool) -> tuple[Any, int]:
    """Return the items and the number of partial results of each query head."""
    begins, lengths = layout.cu_seqlens_q.numpy(), layout.seq_lens.numpy()
    if (begins == np.arange(len(begins))).all():
        items = _list_single_tokens(lengths, is_cross)
        if not len(items) or not _may_split(
            int(lengths[items[0, 0]]), lengths
        ):  # the first item is the longest
            return items, 0
    lengths = lengths.astype(np.int64)
    tiles = _tile_tokens(begins.astype(np.int64), lengths, is_cross)
    return _split_tiles(tiles, lengths[tiles[:, 0]], is_cross)


def _list_single_tokens(lengths: Any, is_cross: bool) -> Any:
    """Return the items of a step with one new token per sequence, the usual case."""
    items = np.zeros((len(lengths), 7), np.int32)
    order = np.argsort(-lengths, kind="stable") if len(lengths) > 1 else 0
    items[:, 0] = items[:, 1] = order
    items[:, 2] = 1
    items[:, 3] = 0 if is_cross else lengths[order] - 1
    items[:, 4] = 1
    return items


def _tile_tokens(begins: Any, lengths: Any, is_cross: bool) -> Any:
    """Return int64 [num_tiles, 4]: sequence, first token, number of tokens and first position."""
    counts = begins[1:] - begins[:-1]  # [num_seqs]
    num_tiles = (counts + QUERY_TILE - 1) // QUERY_TILE
    sequence = np.repeat(np.arange(len(counts)), num_tiles)  # [num_tiles]
    before = (num_tiles.cumsum() - num_tiles)[sequence]  # number of tiles of earlier sequences
    offset = (np.arange(len(sequence)) - before) * QUERY_TILE
    count = np.minimum(counts[sequence] - offset, QUERY_TILE)
    position = np.zeros_like(offset) if is_cross else (lengths - counts)[sequence] + offset
    return np.stack((sequence, begins[sequence] + offset, count, position), 1)


def _may_split(length: Any, lengths: Any) -> Any:
    """Return True if a tile of a sequence of `length` may be split in a step with sequences of `lengths`."""
    return (length > SEGMENT_LEN) & (length >= LEAST_SPLIT_SHARE * lengths.sum())


def _split_tiles(tiles: Any, lengths: Any, is_cross: bool) -> tuple[Any, int]:
    """Return the items of tiles, and the number of partial results. `lengths` are those of the tiles'
    sequences."""
    counts = tiles[:, 2]
    is_split = (counts <= MAX_SPLIT_TOKENS) & _may_split(lengths, lengths)
    parts = np.where(is_split, -(-lengths // SEGMENT_LEN), 1)
    partials = np.where(is_split, parts * counts, 0)
    tile = np.repeat(np.arange(len(tiles)), parts)  # [num_items]
    segment = np.arange(len(tile)) - (parts.cumsum() - parts)[tile]
    num_keys = lengths if is_cross else tiles[:, 3] + counts
    num_keys = np.where(
        is_split[tile], np.minimum(lengths[tile] - segment * SEGMENT_LEN, SEGMENT_LEN), num_keys[tile]
    )
    first_partial = (partials.cumsum() - partials)[tile]
    items = np.column_stack((tiles[tile], parts[tile], segment, first_partial))
    return items[np.argsort(-num_keys * counts[tile], kind="stable")].astype(np.int32), int(partials.sum())
