"""Draft proposer by a speculator that keeps nothing between steps."""

from collections.abc import Sequence

import numpy as np
import torch

from tgis.shard.memory.placing import place
from tgis.shard.runner.proposer import NO_TOKENS, FollowedWork, TakeStates
from tgis.shard.runner.row_table import Integers, RowTable, TokenIds
from tgis.shard.speculators.interface import Speculator, StageRunner, run_stage


class SpeculatorProposer:
    """`FollowingProposer` by a speculator. It keeps the state before the last token of each row."""

    def __init__(
        self,
        speculator: Speculator,
        width: int,
        table: RowTable,
        run: StageRunner = run_stage,
        num_idle: int = 0,
    ) -> None:
        """`width` is that of the model's states, which are kept for all rows and `num_idle` others."""
        self._speculator = speculator
        self._run = run
        self._table = table
        num_rows = len(table.rows)
        self._states = torch.zeros(num_rows + num_idle, width, device=table.device)
        # Number of tokens of a row when its state was kept. A state of another length is not used.
        self._lengths = np.zeros(num_rows, np.int64)

    def reset(self) -> None:
        self._lengths[:] = 0

    def open_rows(self, rows: Integers) -> None:
        self._lengths[rows] = 0

    def follow(self, work: FollowedWork, take: TakeStates) -> None:
        """Keep the states of a step's rows."""
        lengths = self._table.lengths[work.rows]
        # The last token was sampled from the state of the one before it.
        at = lengths - 2 - work.starts
        is_computed = (at >= 0) & (at < work.counts) & ~self._table.ended[work.rows]
        rows = work.rows[is_computed]
        if not len(rows):
            return
        self._states[place(rows, self._table.device)] = take((work.begins + at)[is_computed])
        self._lengths[rows] = lengths[is_computed]

    def skip(self, rows: Integers, starts: Integers) -> None:
        """Do nothing: the states of rows are not used any more when the rows are longer."""

    def propose(self, rows: Integers, token_ids: Sequence[TokenIds], max_drafts: Integers) -> list[TokenIds]:
        """Return drafts of rows whose state is known, and none of others."""
        is_known = self._lengths[rows] == [len(ids) for ids in token_ids]
        known = is_known.nonzero()[0]
        proposed = [NO_TOKENS] * len(rows)
        num_tokens = min(int(max_drafts[known].max(initial=0)), self._speculator.num_tokens)
        if not num_tokens:
            return proposed
        newest = np.array([token_ids[i][-1] for i in known.tolist()])
        drafts = self._draft(rows[known], newest, num_tokens)
        for i, ids in zip(known.tolist(), drafts, strict=True):
            proposed[i] = ids[: max_drafts[i]]
        return proposed

    def _draft(self, rows: Integers, token_ids: TokenIds, num_tokens: int) -> TokenIds:
        """Return drafts [n, num_tokens] of rows, given their last tokens."""
        device = self._table.device
        with torch.inference_mode():
            states = self._states[place(rows, device)]
            newest = place(token_ids.astype(np.int64), device)
            drafts = self._speculator.propose(states, newest, num_tokens, self._run)
        chosen: TokenIds = drafts.numpy(force=True).astype(np.int32)
        return chosen
