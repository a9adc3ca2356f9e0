"""Draft proposer by a speculator that keeps nothing between steps."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.models.interface import SpeculativeModel
from tgis.shard.runner.proposer import NO_TOKENS, FollowedWork
from tgis.shard.runner.row_table import Integers, RowTable, TokenIds
from tgis.shard.speculators.interface import Speculator, StageRunner, run_stage


class SpeculatorProposer:
    """`FollowingProposer` by a speculator. It keeps the state before the last token of each row."""

    def __init__(
        self,
        speculator: Speculator,
        model: SpeculativeModel,
        table: RowTable,
        run: StageRunner = run_stage,
    ) -> None:
        self._speculator = speculator
        self._run = run
        self._model = model
        self._table = table
        num_rows = len(table.rows)
        self._states = torch.zeros(num_rows, model.prompt_width, device=table.device)
        # Number of tokens of a row when its state was kept. A state of another length is not used.
        self._lengths = np.zeros(num_rows, np.int64)

    def reset(self) -> None:
        self._lengths[:] = 0

    def open_rows(self, rows: Integers) -> None:
        self._lengths[rows] = 0

    def follow(self, work: FollowedWork, x: Tensor, adapters: TokenAdapters | None) -> None:
        """Keep the states of a step's rows."""
        lengths = self._table.lengths[work.rows]
        # The last token was sampled from the state of the one before it.
        at = lengths - 2 - work.starts
        is_computed = (at >= 0) & (at < work.counts) & ~self._table.ended[work.rows]
        rows = work.rows[is_computed]
        if not len(rows):
            return
        index = torch.from_numpy((work.begins + at)[is_computed])
        self._states[torch.from_numpy(rows)] = self._model.final_states(
            x[index], adapters and adapters.take(index)
        )
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
        newest = torch.tensor([int(token_ids[i][-1]) for i in known.tolist()])
        states = self._states[torch.from_numpy(rows[known])]
        with torch.inference_mode():
            drafts = self._speculator.propose(states, newest.to(states.device), num_tokens, self._run)
        for i, ids in zip(known.tolist(), drafts.numpy(force=True).astype(np.int32), strict=True):
            proposed[i] = ids[: max_drafts[i]]
        return proposed
