"""Plan of a step's attention on the CPU: tiles of queries, slots of new keys, and a table of all of it."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tgis.shard.attention.interface import StepLayout

QUERY_TILE = 32  # most tokens of one sequence that a tile of queries holds


class CpuPlan:
    """Data of a step that the compiled kernels need. They read all of it through `table`.

    tiles: int32 [num_tiles, 4], the sequence, the index in the step of the first token, the number of tokens,
    and the first token's position. The costliest come first, so that threads finish together.

    table: int64 [9], the numbers of tokens, sequences, entries of a block table and tiles, the largest number
    of tokens of a tile, and the addresses of seq_lens, block_tables, tiles and slots."""

    def __init__(self, layout: StepLayout, block_size: int, is_cross: bool):
        self.tiles = torch.from_numpy(_tile(layout, is_cross))
        self.slots = torch.empty(0, dtype=torch.int64) if is_cross else layout.find_slots(block_size)
        block_tables = layout.block_tables.contiguous()
        # Their memory lives as long as a plan whose table has their addresses.
        self._tensors = (layout.seq_lens.contiguous(), block_tables, self.tiles, self.slots)
        self.table = self._make_table(layout)

    def copy_into(self, fixed: "CpuPlan") -> None:
        fixed.table.copy_(self.table)
        fixed._tensors = self._tensors

    def _make_table(self, layout: StepLayout) -> Tensor:
        addresses = [x.data_ptr() for x in self._tensors]
        num_seqs, max_blocks = layout.block_tables.shape
        num_tokens, num_tiles = int(layout.cu_seqlens_q.numpy()[-1]), len(self.tiles)
        most = 1 if num_tokens == num_seqs == num_tiles else QUERY_TILE
        table = (num_tokens, num_seqs, max_blocks, num_tiles, most, *addresses)
        return torch.from_numpy(np.array(table, np.int64))


def _tile(layout: StepLayout, is_cross: bool) -> Any:
    begins, lengths = layout.cu_seqlens_q.numpy(), layout.seq_lens.numpy()
    if (begins == np.arange(len(begins))).all():
        return _tile_single_tokens(lengths, is_cross)
    return _tile_tokens(begins.astype(np.int64), lengths.astype(np.int64), is_cross)


def _tile_single_tokens(lengths: Any, is_cross: bool) -> Any:
    tiles = np.empty((len(lengths), 4), np.int32)
    order = np.argsort(-lengths, kind="stable") if len(lengths) > 1 else 0
    tiles[:, 0] = tiles[:, 1] = order
    tiles[:, 2], tiles[:, 3] = 1, 0 if is_cross else lengths[order] - 1
    return tiles


def _tile_tokens(begins: Any, lengths: Any, is_cross: bool) -> Any:
    counts = begins[1:] - begins[:-1]  # [num_seqs]
    tiles_of = (counts + QUERY_TILE - 1) // QUERY_TILE
    sequence = np.repeat(np.arange(len(counts)), tiles_of)  # [num_tiles]
    before = (tiles_of.cumsum() - tiles_of)[sequence]  # number of tiles of earlier sequences
    offset = (np.arange(len(sequence)) - before) * QUERY_TILE
    count = np.minimum(counts[sequence] - offset, QUERY_TILE)
    position = (lengths - counts)[sequence] + offset
    seen = position + count
    if is_cross:
        position, seen = np.zeros_like(position), lengths[sequence]
    tiles = np.stack((sequence, begins[sequence] + offset, count, position), 1)
    return tiles[np.argsort(-seen * count, kind="stable")].astype(np.int32)
