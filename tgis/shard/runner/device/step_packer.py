"""Packs a step's work for a device. Sequences with a single new token come first."""

from typing import NamedTuple

import numpy as np
import torch

from tgis.shard.adapters.registry import LoadedAdapters
from tgis.shard.kernels.cuda.attention import CudaAttention, Tile, cut_tiles
from tgis.shard.kernels.cuda.step_state import RowState
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.models.interface import VirtualTokens
from tgis.shard.runner.batch_builder import Work
from tgis.shard.runner.device.device_table import DeviceTable
from tgis.shard.runner.device.uploads import Words
from tgis.shard.runner.row_table import Integers, RowLimits, TokenIds


class StagedArrays(NamedTuple):
    """Fields of `StagedStep`, on the host."""

    seq_rows: Words
    seq_ends: Words
    token_rows: Words
    token_ids: Words
    positions: Words
    slots: Words
    new_blocks: Words
    tiles: Words
    cross_tiles: Words
    sampled_rows: Words
    sampled_x: Words


class StagedSize(NamedTuple):
    num_tokens: int
    num_seqs: int
    num_single: int  # sequences of a single new token
    max_seq_len: int
    max_cross_len: int  # tokens of the longest encoder's sequence


class StepPacker(DeviceTable):
    """Row table that packs steps for its device."""

    def __init__(
        self,
        max_rows: int,
        limits: RowLimits,
        device: torch.device,
        adapters: LoadedAdapters,
        attention: CudaAttention,
        state: RowState,
    ):
        super().__init__(max_rows, limits, device, adapters, attention, state)
        self._tile_tokens = attention.tile_tokens
        self._idle_row, self._dummy_slot = state.idle_row, state.dummy_slot

    def virtual_tokens(self, work: Work) -> VirtualTokens | None:
        return self._row_adapters.virtual_tokens("decoder", work.rows, work.starts, work.layout.begins)

    def token_adapters(self, work: Work) -> TokenAdapters | None:
        return self._row_adapters.token_adapters(work.rows, work.layout.sequence)

    def pack_step(self, work: Work, new_blocks: Words) -> tuple[StagedArrays, StagedSize]:
        rows, ends, layout = work.rows, work.ends, work.layout
        assert (ends <= self._num_blocks[rows] * self._block_size).all(), "work without blocks to write to"
        row, counts = rows[layout.sequence], ends - work.starts  # [num_tokens], [num_seqs]
        encoder_lens = self._rows["encoder_len"][rows] if self._limits.is_encoder_decoder else ends[:0]
        arrays = StagedArrays(
            seq_rows=rows.astype(np.int32),
            seq_ends=ends.astype(np.int32),
            token_rows=row.astype(np.int32),
            token_ids=self._token_ids[row, layout.positions],
            positions=layout.positions.astype(np.int32),
            slots=self._find_slots(row, layout.positions),
            new_blocks=new_blocks,
            tiles=self._cut_tiles(work, work.starts, ends),
            cross_tiles=self._cut_tiles(work, np.zeros_like(rows), encoder_lens),
            sampled_rows=work.sampled_rows.astype(np.int32),
            sampled_x=work.sampled_x.astype(np.int32),
        )
        longest = int(ends.max()), int(encoder_lens.max(initial=0))
        return arrays, StagedSize(len(row), len(rows), int(np.count_nonzero(counts == 1)), *longest)

    def pad_step(self, arrays: StagedArrays, num_rows: int) -> StagedArrays:
        """Fill up a step of single tokens with the idle row. Its samples get the order of its tokens."""
        idle, block = self._idle_row, self._dummy_slot // self._block_size
        sampled_rows = np.full(num_rows, idle, np.int32)
        sampled_rows[arrays.sampled_x] = arrays.sampled_rows
        new_blocks = np.full((num_rows, 3), (idle, 0, block), np.int32)
        new_blocks[: len(arrays.new_blocks)] = arrays.new_blocks
        return StagedArrays(
            seq_rows=_pad(arrays.seq_rows, num_rows, idle),
            seq_ends=_pad(arrays.seq_ends, num_rows, 0),
            token_rows=_pad(arrays.token_rows, num_rows, idle),
            token_ids=_pad(arrays.token_ids, num_rows, 0),
            positions=_pad(arrays.positions, num_rows, 0),
            slots=_pad(arrays.slots, num_rows, self._dummy_slot),
            new_blocks=new_blocks,
            tiles=_empty(5),
            cross_tiles=_empty(5),
            sampled_rows=sampled_rows,
            sampled_x=np.arange(num_rows, dtype=np.int32),
        )

    def idle_step(self, num_rows: int) -> StagedArrays:
        """Return a step of the idle row alone."""
        none, no_blocks, no_tiles = np.empty(0, np.int32), _empty(3), _empty(5)
        empty = StagedArrays(none, none, none, none, none, none, no_blocks, no_tiles, no_tiles, none, none)
        return self.pad_step(empty, num_rows)

    def fixed_size(self, num_rows: int) -> StagedSize:
        """Return the size of a step of single tokens whose lengths are not known."""
        longest = self._limits.max_sequence_length
        return StagedSize(num_rows, num_rows, num_rows, longest, longest)

    def _plain_work(self, rows: Integers, starts: Integers, ends: Integers) -> Work:
        order = _order(ends - starts)
        if order is not None:
            rows, starts, ends = rows[order], starts[order], ends[order]
        return super()._plain_work(rows, starts, ends)

    def _draft_work(
        self, rows: Integers, starts: Integers, ends: Integers, num_drafts: Integers, ids: TokenIds
    ) -> Work:
        order = _order(ends - starts + num_drafts)
        if order is not None:
            parts = np.split(ids, num_drafts.cumsum()[:-1])
            ids = np.concatenate([parts[i] for i in order.tolist()])
            rows, starts, ends, num_drafts = rows[order], starts[order], ends[order], num_drafts[order]
        return super()._draft_work(rows, starts, ends, num_drafts, ids)

    def _find_slots(self, row: Integers, positions: Integers) -> Words:
        place, offset = np.divmod(positions, self._block_size)
        return self._block_tables[row, place] * np.int32(self._block_size) + offset.astype(np.int32)

    def _cut_tiles(self, work: Work, positions: Integers, seq_lens: Integers) -> Words:
        """Return the tiles of sequences with several new tokens, of which the first are at `positions`
        [num_seqs] of sequences whose lengths are `seq_lens` [num_seqs], or [0]: there are none."""
        begins, spans = work.layout.begins.tolist(), []
        for i in np.flatnonzero(work.ends - work.starts > 1).tolist() if len(seq_lens) else ():
            count = begins[i + 1] - begins[i]
            spans.append(Tile(int(work.rows[i]), begins[i], count, int(positions[i]), int(seq_lens[i])))
        return np.array(list(cut_tiles(spans, self._tile_tokens)), np.int32).reshape(-1, 5)


def _order(counts: Integers) -> Integers | None:
    """Return the order that puts sequences of a single new token first, or None if they are."""
    is_single = counts == 1
    if not (is_single[1:] & ~is_single[:-1]).any():
        return None
    return np.argsort(~is_single, kind="stable")


def _pad(array: Words, size: int, value: int) -> Words:
    found = np.full(size, value, np.int32)
    found[: len(array)] = array
    return found


def _empty(width: int) -> Words:
    return np.empty((0, width), np.int32)
