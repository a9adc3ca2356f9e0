"""Drafts that a shard proposes itself, where the router leaves them to it."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tgis.shard.runner.row_table import Integers, TokenIds


class DraftProposer(Protocol):
    """Proposer beside the model, such as a speculator. All ranks must propose the same drafts."""

    def propose(self, rows: Integers, token_ids: Sequence[TokenIds], most: Integers) -> list[TokenIds]:
        """Return drafts of the next tokens of each row [n], at most `most` [n] of them. `token_ids` has the
        prompt and generated tokens of each row; the last one's output is not computed yet."""


def merge_proposed(
    counts: Integers, token_ids: TokenIds, at: Integers, proposed: list[TokenIds]
) -> tuple[Integers, TokenIds]:
    """Insert the drafts proposed for the sequences `at` into those of a step, of which each sequence has
    `counts` [num_seqs]."""
    parts = np.split(token_ids, counts.cumsum()[:-1])
    for i, drafts in zip(at.tolist(), proposed, strict=True):
        assert not len(parts[i]), "drafts of the router and of the shard for one row"
        parts[i] = drafts
    return np.array([len(part) for part in parts]), np.concatenate(parts).astype(np.int32)
