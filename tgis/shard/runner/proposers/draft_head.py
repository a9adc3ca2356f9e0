"""Draft proposer by a head with layers of its own, whose cache follows the rows."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tgis.shard.memory.placing import place
from tgis.shard.runner.batch_builder import BatchBuilder, Work
from tgis.shard.runner.proposer import NO_TOKENS, FollowedWork, TakeStates
from tgis.shard.runner.proposers.cached_tokens import CachedTokens
from tgis.shard.runner.proposers.head_forward import HeadForward
from tgis.shard.runner.row_table import Integers, Layout, TokenIds

# Number of a row's states that wait for the next drafts, so that the head computes several tokens at once.
MAX_HELD = 8


class DraftHeadProposer:
    """`FollowingProposer` by a draft head.

    Its cache has the blocks of the served model's. A token's keys and values depend only on the tokens up to
    it, so rows that share blocks share these as well. The served model computes no states for blocks of the
    prefix cache, so the head keeps the state of each block's last token. A row whose states are not known
    gets no drafts."""

    def __init__(self, forward: HeadForward, builder: BatchBuilder, num_blocks: int):
        self._forward = forward
        head = forward.head
        self._builder = builder
        self._table = table = builder.table
        self._cached = CachedTokens(table, num_blocks)
        num_rows = len(table.rows)
        device = table.device
        # States from that before the first token that is not in the cache to that of the last computed token.
        self._held = torch.zeros(num_rows, MAX_HELD, head.state_size, device=device)
        self._num_held = np.zeros(num_rows, np.int64)
        self._is_known = np.zeros(num_rows, np.bool_)  # False: states are missing
        self._ends = torch.zeros(num_blocks, head.state_size, device=device)  # of each block's last token

    def reset(self) -> None:
        self.open_rows(np.arange(len(self._num_held)))
        self._cached.reset()

    def open_rows(self, rows: Integers) -> None:
        self._cached.open_rows(rows)
        self._num_held[rows] = 0
        self._is_known[rows] = False

    def follow(self, work: FollowedWork, take: TakeStates) -> None:
        """Keep the states of a step's tokens, or compute the tokens after them."""
        rows, starts, ends, begins = work
        self._begin_rows(rows, starts)
        # Drafts that were not accepted have no states.
        ends = np.minimum(ends, self._table.lengths[rows] - 1)
        self._is_known[rows] &= self._cached.counts[rows] + self._num_held[rows] == starts + 1
        some = (self._is_known[rows] & (ends > starts)).nonzero()[0]
        if not len(some):
            return
        rows, starts, ends, begins = rows[some], starts[some], ends[some], begins[some]
        layout = Layout.of(starts, ends)
        at = (begins - layout.begins[:-1])[layout.sequence] + np.arange(layout.begins[-1])
        with torch.inference_mode():
            states = take(at)
            self._keep_ends(rows[layout.sequence], layout.positions, states)
            self._keep(rows, ends, layout, states)

    def skip(self, rows: Integers, starts: Integers) -> None:
        self._cached.see_blocks(rows, starts)
        self._is_known[rows] = False

    def propose(self, rows: Integers, token_ids: Sequence[TokenIds], max_drafts: Integers) -> list[TokenIds]:
        """Return drafts of rows whose states are known, and none of others."""
        lengths = np.array([len(ids) for ids in token_ids])
        proposed = [NO_TOKENS] * len(rows)
        self._begin_rows(rows, lengths - 1)
        held = self._num_held[rows]
        is_next = (held > 0) & (self._cached.counts[rows] + held == lengths) & (lengths > 1)
        known = (self._is_known[rows] & is_next).nonzero()[0]
        if len(known):
            with torch.inference_mode():
                drafts = self._run(rows[known], lengths[known], max_drafts[known])
            for i, ids in zip(known.tolist(), drafts, strict=True):
                proposed[i] = ids
        return proposed

    def _begin_rows(self, rows: Integers, starts: Integers) -> None:
        """Set the state before the first tokens of new rows, if it is known."""
        sharing = self._cached.see_blocks(rows, starts)
        first = rows[starts == 0]
        self._held[self._place(first), 0] = 0.0
        sharing = sharing[self._cached.counts[sharing] > 0]
        lasts = self._cached.counts[sharing] // self._table.block_size - 1
        blocks = self._table.block_tables[sharing, lasts].astype(np.int64)
        self._held[self._place(sharing), 0] = self._ends[self._place(blocks)]
        for begun in (first, sharing):
            self._num_held[begun] = 1
            self._is_known[begun] = True

    def _keep_ends(self, rows: Integers, positions: Integers, states: Tensor) -> None:
        size = self._table.block_size
        (at,) = (positions % size == size - 1).nonzero()
        blocks = self._table.block_tables[rows[at], positions[at] // size].astype(np.int64)
        self._ends[self._place(blocks)] = states[self._place(at)]

    def _keep(self, rows: Integers, ends: Integers, layout: Layout, states: Tensor) -> None:
        """Hold the new states of rows. If some have to be used, use those of all rows together."""
        held = self._num_held[rows]
        counts = np.diff(layout.begins)
        if not self._must_use(rows, ends, counts):
            places = self._place(Layout.of(held, held + counts).positions)
            self._held[self._place(rows[layout.sequence]), places] = states
            self._num_held[rows] += counts
            return
        self._use(rows, ends, layout.begins[:-1], states)
        self._held[self._place(rows), 0] = states[self._place(layout.begins[1:] - 1)]
        self._num_held[rows] = 1

    def _must_use(self, rows: Integers, ends: Integers, counts: Integers) -> bool:
        """Return True if a row has too many states or has ended, or if its prompt fills a block, which new
        rows may share."""
        size = self._table.block_size
        is_prompt = ends - counts < self._table.rows["opened_len"][rows]
        fills = is_prompt & (ends // size > self._cached.counts[rows] // size)
        has_most = self._num_held[rows] + counts > MAX_HELD
        return bool((fills | has_most | self._table.ended[rows]).any())

    def _use(self, rows: Integers, ends: Integers, begins: Integers, states: Tensor) -> None:
        """Compute the tokens of rows before `ends`. The first states before them are held, the others are
        `states` from index `begins` on."""
        starts = self._cached.counts[rows]
        layout = Layout.of(starts, ends)
        if not len(layout.positions):
            return
        number = layout.positions - starts[layout.sequence]
        held = self._num_held[rows][layout.sequence]
        is_held = number < held
        old = is_held.nonzero()[0]
        new = (~is_held).nonzero()[0]
        before = torch.empty(len(number), states.shape[1], device=states.device)
        before[self._place(old)] = self._take_held(rows[layout.sequence][old], number[old])
        at = (begins[layout.sequence] + number - held)[new]
        before[self._place(new)] = states[self._place(at)]
        some = ends > starts
        self._advance(rows[some], starts[some], ends[some], before)
        self._cached.advance(rows, ends)

    def _run(self, rows: Integers, lengths: Integers, max_drafts: Integers) -> list[TokenIds]:
        """Compute the missing tokens of rows, and all drafts except the last ones."""
        starts = self._cached.counts[rows]
        layout = Layout.of(starts, lengths)
        number = layout.positions - starts[layout.sequence]
        before = self._take_held(rows[layout.sequence], number)
        after = self._advance(rows, starts, lengths, before)
        states = after[self._place(layout.begins[1:] - 1)]
        self._cached.advance(rows, lengths)
        self._num_held[rows] = 0
        drafts = np.zeros((len(rows), int(max_drafts.max())), np.int32)
        drafts[:, 0] = self._choose(states)
        live = np.arange(len(rows))
        for count in range(1, drafts.shape[1]):
            (kept,) = (max_drafts[live] > count).nonzero()
            live = live[kept]
            ends = lengths[live] + count
            self._table.token_ids[rows[live], ends - 1] = drafts[live, count - 1]
            states = self._advance(rows[live], ends - 1, ends, states[self._place(kept)])
            drafts[live, count] = self._choose(states)
        return [ids[:count] for ids, count in zip(drafts, max_drafts.tolist(), strict=True)]

    def _choose(self, states: Tensor) -> TokenIds:
        chosen: TokenIds = self._forward.choose(states).numpy(force=True)
        return chosen.astype(np.int32)

    def _advance(self, rows: Integers, starts: Integers, ends: Integers, states: Tensor) -> Tensor:
        layout = Layout.of(starts, ends)
        none = np.zeros(0, np.int64)
        batch = self._builder.pack_work(Work(rows, starts, ends, layout, none, none, []))
        # A token has the position of the state before it.
        inputs = replace(batch.inputs, positions=(batch.inputs.positions - 1).clamp_(min=0))
        return self._forward.advance(states, inputs)

    def _take_held(self, rows: Integers, numbers: Integers) -> Tensor:
        return self._held[self._place(rows), self._place(numbers)]

    def _place(self, at: Integers) -> Tensor:
        return place(at, self._table.device)
