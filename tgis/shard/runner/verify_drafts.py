"""Drafts are accepted exactly where they are what would have been sampled: a row's positions are sampled one
after the other, by everything that decides a token, for as long as the draft was right."""

from collections.abc import Callable, Iterator

import numpy as np

from tgis.shard.runner.batch_builder import Batch
from tgis.shard.runner.row_table import Integers
from tgis.shard.runner.step_response import Sampled

# Of places [n] in [num_sampled], no two of one row: their tokens.
Sample = Callable[[Integers], Sampled]


def follow_drafts(batch: Batch, sample: Sample) -> Iterator[Sampled]:
    """Each row's first sample, then the second of those whose first was the draft, and so on; a row that has
    ended, or for which there was no token to be had, goes no further."""
    assert batch.drafts is not None
    rows = batch.sampled_rows
    at = np.flatnonzero(np.diff(rows, prepend=-1))
    while len(at):
        sampled = sample(at)
        yield sampled
        at = at[sampled.kept]
        at = at[(sampled.token_ids == batch.drafts[at]) & ~sampled.ended] + 1
