"""Packs a step's work for a device. Sequences with a single new token come first."""

from typing import NamedTuple

import numpy as np

from tgis.shard.kernels.cuda.attention import QueryTile, cut_tiles
from tgis.shard.kernels.cuda.grouped.slots import MAX_RANK
from tgis.shard.kernels.cuda.step_state import RowState
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.models.interface import VirtualTokens
from tgis.shard.runner.batch_builder import Work
from tgis.shard.runner.device.device_table import DeviceTable
from tgis.shard.runner.device.uploads import Words
from tgis.shard.runner.graph_sizes import GraphSize
from tgis.shard.runner.row_table import Integers

MAX_PROMPTS = 8  # per captured step
NO_WORDS = np.empty(0, np.int32)


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
    spans: Words
    adapter_slots: Words


class StagedSize(NamedTuple):
    num_tokens: int
    num_seqs: int
    num_single: int  # sequences with a single new token
    max_seq_len: int
    max_cross_len: int  # length of the longest encoder sequence
    max_rank: int = MAX_RANK  # of the adapters in slots


class Capacity(NamedTuple):
    """Capacity of a captured step, apart from its tokens."""

    num_new_blocks: int
    num_tiles: int
    num_sampled: int

    def holds(self, arrays: StagedArrays) -> bool:
        needed = len(arrays.new_blocks), len(arrays.tiles), len(arrays.sampled_x)
        return all(count <= maximum for count, maximum in zip(needed, self, strict=True))


class StepPacker:
    """Packer of steps of a table's rows for a device. `dummy_state` is the slot of a state that no sequence
    has; None if the model keeps no states."""

    def __init__(self, table: DeviceTable, tile_tokens: int, state: RowState, dummy_state: int | None = None):
        self.table = table
        self._block_size = table.block_size
        self._tile_tokens = tile_tokens
        self._dummy_state = dummy_state
        self._idle_row = state.idle_row
        self._dummy_slot = state.dummy_slot

    def virtual_tokens(self, work: Work) -> VirtualTokens | None:
        return self.table.row_adapters.virtual_tokens("decoder", work.rows, work.starts, work.layout.begins)

    def token_adapters(self, work: Work) -> TokenAdapters | None:
        return self.table.row_adapters.token_adapters(work.rows, work.layout.sequence)

    def pack_step(
        self, work: Work, new_blocks: Words, adapter_slots: Words = NO_WORDS
    ) -> tuple[StagedArrays, StagedSize]:
        """Return the step and its size. `adapter_slots` has the slot of each sequence; empty: there are
        none."""
        table = self.table
        rows = work.rows
        ends = work.ends
        layout = work.layout
        assert (ends <= table.num_blocks[rows] * self._block_size).all(), "work without cache blocks"
        row = rows[layout.sequence]  # [num_tokens]
        counts = ends - work.starts  # [num_seqs]
        encoder_lens = table.rows["encoder_len"][rows] if table.limits.is_encoder_decoder else ends[:0]
        arrays = StagedArrays(
            seq_rows=rows.astype(np.int32),
            seq_ends=ends.astype(np.int32),
            token_rows=row.astype(np.int32),
            token_ids=table.token_ids[row, layout.positions],
            positions=layout.positions.astype(np.int32),
            slots=self._find_slots(row, layout.positions),
            new_blocks=new_blocks,
            tiles=self._cut_tiles(work, work.starts, ends),
            cross_tiles=self._cut_tiles(work, np.zeros_like(rows), encoder_lens),
            sampled_rows=self._find_first_rows(work),
            sampled_x=work.sampled_x.astype(np.int32),
            spans=self._find_spans(work),
            adapter_slots=adapter_slots[layout.sequence] if len(adapter_slots) else NO_WORDS,
        )
        size = StagedSize(
            num_tokens=len(row),
            num_seqs=len(rows),
            num_single=int(np.count_nonzero(counts == 1)),
            max_seq_len=int(ends.max()),
            max_cross_len=int(encoder_lens.max(initial=0)),
        )
        return arrays, size

    def _find_first_rows(self, work: Work) -> Words:
        """Return the sampled rows, with the idle row for samples after drafts."""
        rows = work.sampled_rows
        if work.drafts is not None:
            rows = np.where(work.count_drafts() > 0, self._idle_row, rows)
        return rows.astype(np.int32)

    def find_capacity(self, size: GraphSize) -> Capacity:
        rows, count = size.num_rows, size.num_prompt_tokens
        if not count:
            return Capacity(rows, 0, rows)
        return Capacity(
            num_new_blocks=rows + count // self._block_size + MAX_PROMPTS,
            num_tiles=-(-count // self._tile_tokens) + MAX_PROMPTS,
            num_sampled=min(self._idle_row, rows + MAX_PROMPTS),
        )

    def pad_step(self, arrays: StagedArrays, size: GraphSize, num_single: int) -> StagedArrays:
        """Pad a step with the idle row, at the end and between its `num_single` first tokens and the prompt
        tokens. Without prompts, the samples get the order of the tokens."""
        idle = self._idle_row
        block = self._dummy_slot // self._block_size
        capacity = self.find_capacity(size)
        gap = size.num_rows - num_single

        def spread(values: Words, fill: int) -> Words:
            padded = np.full(size.num_tokens, fill, np.int32)
            padded[:num_single] = values[:num_single]
            padded[size.num_rows : len(values) + gap] = values[num_single:]
            return padded

        sampled_rows, sampled_x = self._pad_samples(arrays, size, num_single)
        tiles = arrays.tiles.copy()
        tiles[:, QueryTile._fields.index("first")] += gap
        return StagedArrays(
            seq_rows=_pad(arrays.seq_rows[:num_single], size.num_rows, idle),
            seq_ends=_pad(arrays.seq_ends[:num_single], size.num_rows, 0),
            token_rows=spread(arrays.token_rows, idle),
            token_ids=spread(arrays.token_ids, 0),
            positions=spread(arrays.positions, 0),
            slots=spread(arrays.slots, self._dummy_slot),
            new_blocks=_pad_rows(arrays.new_blocks, capacity.num_new_blocks, (idle, 0, block)),
            tiles=_pad_rows(tiles, capacity.num_tiles, (idle, 0, 0, 0, 0)),
            cross_tiles=_empty(5),
            sampled_rows=sampled_rows,
            sampled_x=sampled_x,
            spans=self._pad_spans(arrays, size, num_single),
            adapter_slots=spread(arrays.adapter_slots, -1) if size.has_adapters else NO_WORDS,
        )

    def _find_spans(self, work: Work) -> Words:
        if self._dummy_state is None:
            return _empty(3).T
        slots = np.append(self.table.rows["state_slot"][work.rows], self._dummy_state)
        return np.stack([slots, work.layout.begins, np.append(work.starts, 0)]).astype(np.int32)

    def _pad_spans(self, arrays: StagedArrays, size: GraphSize, num_single: int) -> Words:
        """Pad spans with the dummy state: to one token for each row, and to as many prompts as tiles, because
        each prompt has a tile."""
        if self._dummy_state is None:
            return _empty(3).T
        gap = size.num_rows - num_single
        num_prompts = max(arrays.spans.shape[1] - 1 - num_single, 0)
        count = size.num_rows + self.find_capacity(size).num_tiles
        spans = np.zeros((3, count + 1), np.int32)
        slots, begins, starts = spans
        slots[:] = self._dummy_state
        begins[: size.num_rows] = np.arange(size.num_rows)
        # Prompts end where the next one begins, and those that are missing have no tokens.
        begins[size.num_rows :] = len(arrays.token_rows) + gap
        for padded, values in ((slots, arrays.spans[0]), (starts, arrays.spans[2])):
            padded[:num_single] = values[:num_single]
            padded[size.num_rows :][:num_prompts] = values[num_single : num_single + num_prompts]
        begins[size.num_rows :][:num_prompts] = arrays.spans[1, num_single : num_single + num_prompts] + gap
        return spans

    def _pad_samples(self, arrays: StagedArrays, size: GraphSize, num_single: int) -> tuple[Words, Words]:
        """Return the rows that sample, and the indices of the tokens before the samples."""
        count = self.find_capacity(size).num_sampled
        if size.num_prompt_tokens:
            is_prompt = arrays.sampled_x >= num_single
            x = arrays.sampled_x + np.where(is_prompt, np.int32(size.num_rows - num_single), np.int32(0))
            return _pad(arrays.sampled_rows, count, self._idle_row), _pad(x, count, 0)
        rows = np.full(count, self._idle_row, np.int32)
        rows[arrays.sampled_x] = arrays.sampled_rows
        return rows, np.arange(count, dtype=np.int32)

    def idle_step(self, size: GraphSize) -> StagedArrays:
        """Return a step that computes only the idle row."""
        none = np.empty(0, np.int32)
        no_blocks = _empty(3)
        no_tiles = _empty(5)
        no_spans = np.zeros((3, 1), np.int32)
        per_token = none, none, none, none, none, none
        empty = StagedArrays(*per_token, no_blocks, no_tiles, no_tiles, none, none, no_spans, none)
        return self.pad_step(empty, size, 0)

    def fixed_size(self, size: GraphSize) -> StagedSize:
        """Return the size of a captured step, with the maximum for the unknown lengths of its sequences."""
        longest = self.table.limits.max_sequence_length
        return StagedSize(size.num_tokens, size.num_rows, size.num_rows, longest, longest)

    def _find_slots(self, row: Integers, positions: Integers) -> Words:
        index, offset = np.divmod(positions, self._block_size)
        return self.table.block_tables[row, index] * np.int32(self._block_size) + offset.astype(np.int32)

    def _cut_tiles(self, work: Work, positions: Integers, seq_lens: Integers) -> Words:
        """Return the tiles of sequences with several new tokens. `positions` [num_seqs] has the position of
        each sequence's first new token, `seq_lens` [num_seqs] the lengths. An empty `seq_lens` yields no
        tiles."""
        begins = work.layout.begins.tolist()
        spans = []
        for i in np.flatnonzero(work.ends - work.starts > 1).tolist() if len(seq_lens) else ():
            count = begins[i + 1] - begins[i]
            spans.append(QueryTile(int(work.rows[i]), begins[i], count, int(positions[i]), int(seq_lens[i])))
        return np.array(list(cut_tiles(spans, self._tile_tokens)), np.int32).reshape(-1, 5)


def _pad(array: Words, size: int, value: int) -> Words:
    padded = np.full(size, value, np.int32)
    padded[: len(array)] = array
    return padded


def _pad_rows(array: Words, size: int, row: tuple[int, ...]) -> Words:
    padded = np.full((size, len(row)), row, np.int32)
    padded[: len(array)] = array
    return padded


def _empty(width: int) -> Words:
    return np.empty((0, width), np.int32)
