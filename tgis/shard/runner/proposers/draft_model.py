"""Draft proposer by a draft model, whose cache follows the rows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tgis.shard.memory.placing import place
from tgis.shard.runner.batch_builder import BatchBuilder, Work
from tgis.shard.runner.forward import Forward
from tgis.shard.runner.proposer import NO_TOKENS, FollowedWork, TakeStates
from tgis.shard.runner.proposers.cached_tokens import CachedTokens
from tgis.shard.runner.row_table import Integers, Layout, TokenIds
from tgis.shard.speculators.draft_model import DraftModel

# A row that lacks more tokens than this gets them first, and drafts in a later step, so that the router does
# not count the time as that of drafts.
MAX_GAP = 8
# Up to this number of tokens, all are scored, because only such steps are captured as kernel graphs.
MAX_SCORED = 64


class DraftLimits(NamedTuple):
    num_blocks: int
    max_step_tokens: int


class DraftModelProposer:
    """`FollowingProposer` by a draft model.

    Its cache has the blocks of the served model's, so that rows that share these share both models' keys and
    values. It computes prompts in the chunks of the served model, but a generated token only when drafts are
    requested. A block may therefore lack the draft model's values. Rows that share it may all compute
    them: the results are equal, because they depend only on the tokens before."""

    def __init__(self, draft: DraftModel, forward: Forward, builder: BatchBuilder, limits: DraftLimits):
        self._draft = draft
        self._forward = forward
        self._builder = builder
        self._limits = limits
        self._table = builder.table
        self._cached = CachedTokens(self._table, limits.num_blocks)
        self._fed = [NO_TOKENS] * len(self._table.rows)  # drafts in the cache after a row's tokens

    def reset(self) -> None:
        self._cached.reset()
        self._fed = [NO_TOKENS] * len(self._fed)

    def open_rows(self, rows: Integers) -> None:
        self._cached.open_rows(rows)
        for row in rows.tolist():
            self._fed[row] = NO_TOKENS

    def follow(self, work: FollowedWork, take: TakeStates) -> None:
        """Compute the prompts among a step's tokens."""
        self._cached.see_blocks(work.rows, work.starts)
        lengths = self._table.rows["opened_len"][work.rows]
        is_prompt = work.starts < lengths
        ends = np.minimum(work.ends, lengths)
        self._catch_up(work.rows[is_prompt], ends[is_prompt])

    def skip(self, rows: Integers, starts: Integers) -> None:
        self._cached.see_blocks(rows, starts)

    def propose(self, rows: Integers, token_ids: Sequence[TokenIds], max_drafts: Integers) -> list[TokenIds]:
        """Return drafts of rows of which the cache lacks few tokens, and none of others."""
        lengths = np.array([len(ids) for ids in token_ids])
        self._cached.see_blocks(rows, lengths - 1)
        for row, ids in zip(rows.tolist(), token_ids, strict=True):
            self._accept(row, ids)
        is_near = lengths - self._cached.counts[rows] <= MAX_GAP
        proposed = [NO_TOKENS] * len(rows)
        with torch.inference_mode():
            self._catch_up(rows[~is_near], lengths[~is_near])
            near = is_near.nonzero()[0]
            if len(near):
                drafts = self._run(rows[near], lengths[near], max_drafts[near])
                for i, ids in zip(near.tolist(), drafts, strict=True):
                    proposed[i] = ids
        return proposed

    def _run(self, rows: Integers, lengths: Integers, max_drafts: Integers) -> list[TokenIds]:
        """Compute the missing tokens of rows, and all drafts except the last ones."""
        drafts = np.zeros((len(rows), int(max_drafts.max())), np.int32)
        drafts[:, 0] = self._score(rows, self._cached.counts[rows], lengths)
        self._advance(rows, lengths)
        for number in range(1, drafts.shape[1]):
            live = (max_drafts > number).nonzero()[0]
            ends = lengths[live] + number
            self._table.token_ids[rows[live], ends - 1] = drafts[live, number - 1]
            drafts[live, number] = self._score(rows[live], ends - 1, ends)
        proposed = [ids[:count] for ids, count in zip(drafts, max_drafts.tolist(), strict=True)]
        for row, ids in zip(rows.tolist(), proposed, strict=True):
            self._fed[row] = ids[:-1]
        return proposed

    def _score(self, rows: Integers, starts: Integers, ends: Integers) -> TokenIds:
        """Compute the tokens [start, end) of each row. Return the most likely next ones."""
        layout = Layout.of(starts, ends)
        lasts = layout.begins[1:] - 1
        num_tokens = len(layout.sequence)
        scored = np.arange(num_tokens) if num_tokens <= MAX_SCORED else lasts
        logits = self._compute(rows, starts, ends, layout, scored)
        assert logits is not None, "every row has a token"
        if len(scored) > len(rows):
            logits = logits[place(lasts, self._table.device)]
        token_ids: TokenIds = logits[:, : self._draft.num_token_ids].argmax(-1).numpy(force=True)
        return token_ids.astype(np.int32)

    def _catch_up(self, rows: Integers, ends: Integers) -> None:
        """Compute the missing tokens of rows before `ends`, as many as a step may have."""
        starts = self._cached.counts[rows]
        counts = np.maximum(ends - starts, 0)
        left = self._limits.max_step_tokens - (counts.cumsum() - counts)
        counts = np.minimum(counts, np.maximum(left, 0))
        some = counts > 0
        if not some.any():
            return
        rows, starts, ends = rows[some], starts[some], (starts + counts)[some]
        self._compute(rows, starts, ends, Layout.of(starts, ends), np.zeros(0, np.int64))
        self._advance(rows, ends)

    def _compute(
        self, rows: Integers, starts: Integers, ends: Integers, layout: Layout, scored: Integers
    ) -> Tensor | None:
        work = Work(rows, starts, ends, layout, rows[layout.sequence[scored]], scored, [])
        batch = self._builder.pack_work(work)
        # The served model may know tokens that this one does not.
        batch.inputs.token_ids.clamp_(max=self._draft.model.spec.vocab_size - 1)
        return self._forward(batch).logits

    def _accept(self, row: int, token_ids: TokenIds) -> None:
        """Count the drafts in the cache that became tokens. The last token is computed in any case."""
        fed = self._fed[row]
        if not len(fed):
            return
        start = int(self._cached.counts[row])
        known = token_ids[start : start + len(fed)]
        is_same = known == fed[: len(known)]
        num_same = len(known) if is_same.all() else int(is_same.argmin())
        end = min(start + num_same, len(token_ids) - 1)
        self._advance(np.array([row]), np.array([end]))

    def _advance(self, rows: Integers, ends: Integers) -> None:
        """Set the number of tokens of rows that are in the cache."""
        self._cached.advance(rows, ends)
        for row in rows.tolist():
            self._fed[row] = NO_TOKENS
