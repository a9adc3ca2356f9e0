"""Verifies drafts of speculative decoding: a draft is accepted exactly if it equals the sampled token.

A row's positions are sampled in order, with all of the row's sampling parameters, until a draft is wrong."""

from collections.abc import Callable, Iterator

import numpy as np

from tgis.shard.runner.batch_builder import Work
from tgis.shard.runner.row_table import Integers
from tgis.shard.runner.step_response import SampledTokens

# Samples the tokens at indices [n] in [num_sampled], at most one index of each row.
Sample = Callable[[Integers], SampledTokens]


def verify_drafts(work: Work, sample: Sample) -> Iterator[SampledTokens]:
    """Yield each row's first sample, then the second sample of the rows whose first one equals the draft, and
    so on. A row stops once it has ended or no token could be sampled for it."""
    assert work.drafts is not None
    rows = work.sampled_rows
    at = np.flatnonzero(np.diff(rows, prepend=-1))
    while len(at):
        sampled = sample(at)
        yield sampled
        at = at[sampled.kept]
        at = at[(sampled.token_ids == work.drafts[at]) & ~sampled.ended] + 1
