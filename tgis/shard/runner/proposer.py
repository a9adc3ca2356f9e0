"""A shard's own draft proposer, for rows for which the router requests drafts of the shard."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from tgis.shard.runner.row_table import Integers, TokenIds

NO_TOKENS = np.zeros(0, np.int32)


class DraftProposer(Protocol):
    """Proposer of drafts, such as a speculator. All ranks must propose the same drafts."""

    def propose(self, rows: Integers, token_ids: Sequence[TokenIds], max_drafts: Integers) -> list[TokenIds]:
        """Return drafts of the next tokens of each row [n], at most `max_drafts` [n]. `token_ids` has the
        prompt and generated tokens of each row; the model has not computed the last one yet."""


class FollowedWork(NamedTuple):
    """Rows of a step whose speculator follows them."""

    rows: Integers  # [n]
    starts: Integers  # [n], positions of the first tokens
    ends: Integers  # [n], positions after the last tokens, including drafts
    begins: Integers  # [n], indices of the first tokens in the step

    @property
    def counts(self) -> Integers:
        return self.ends - self.starts


TakeStates = Callable[[Integers], Tensor]
"""Function that returns the states that a speculator reads, those after the tokens at indices [n] of a step:
float32 [n, any]."""


class FollowingProposer(DraftProposer, Protocol):
    """`DraftProposer` that follows the rows' steps."""

    def reset(self) -> None:
        """Forget all rows."""

    def open_rows(self, rows: Integers) -> None:
        """Forget what is known of rows [n] that were opened again."""

    def follow(self, work: FollowedWork, take: TakeStates) -> None:
        """Follow a step after its tokens were sampled. `take` returns its states, until the next step."""

    def skip(self, rows: Integers, starts: Integers) -> None:
        """Note that a step computes tokens of rows [n] from position `starts` on, and that it is not followed
        for these rows. They get no drafts until they are opened again."""


def merge_proposed(
    counts: Integers, token_ids: TokenIds, at: Integers, proposed: list[TokenIds]
) -> tuple[Integers, TokenIds]:
    """Insert the drafts proposed for the sequences `at` into a step's drafts `token_ids`, of which `counts`
    [num_seqs] belong to each sequence."""
    parts = np.split(token_ids, counts.cumsum()[:-1])
    for i, drafts in zip(at.tolist(), proposed, strict=True):
        assert not len(parts[i]), "both the router and the shard have drafts for one row"
        parts[i] = drafts
    return np.array([len(part) for part in parts]), np.concatenate(parts).astype(np.int32)
