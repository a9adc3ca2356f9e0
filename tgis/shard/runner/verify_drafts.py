"""Verifies the drafts of speculative decoding: a draft is accepted only if it equals the sampled token.

A row's positions are sampled in order, with all its sampling parameters, until a draft is wrong."""

from collections.abc import Callable, Iterator

import numpy as np

from tgis.shard.runner.batch_builder import Work
from tgis.shard.runner.row_table import Integers
from tgis.shard.runner.step_response import SampledTokens

# Function that samples the tokens at indices [n] in [num_sampled], at most one per row.
Sample = Callable[[Integers], SampledTokens]


def verify_drafts(work: Work, sample: Sample) -> Iterator[SampledTokens]:
    """Yield each row's first sample, then the second sample of the rows whose first sample equals the draft,
    and so on. A row stops when it ends or when no token can be sampled for it."""
    assert work.drafts is not None
    rows = work.sampled_rows
    at = np.flatnonzero(np.diff(rows, prepend=-1))
    while len(at):
        sampled = sample(at)
        yield sampled
        at = at[sampled.kept]
        at = at[(sampled.token_ids == work.drafts[at]) & ~sampled.ended] + 1
