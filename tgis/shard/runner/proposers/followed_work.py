"""Divides a step's work into that of rows that a speculator follows, and of others."""

import numpy as np

from tgis.pb import shard_pb2 as pb
from tgis.shard.runner.batch_builder import Work
from tgis.shard.runner.columns import read_column
from tgis.shard.runner.proposer import FollowedWork, FollowingProposer, TakeStates


def split_followed(request: pb.StepRequest, work: Work) -> tuple[FollowedWork, FollowedWork]:
    """Return the rows of a step that the speculator follows, and the others. Sequences that are a row's last
    token and its drafts count as one."""
    firsts = np.flatnonzero(np.diff(work.rows, prepend=-1))
    lasts = np.append(firsts[1:], len(work.rows)) - 1
    columns = work.rows[firsts], work.starts[firsts], work.ends[lasts], work.layout.begins[:-1][firsts]
    flags = np.frombuffer(request.followed, np.bool_)
    is_followed = np.isin(columns[0], read_column(request.rows)[flags] if len(flags) else ())
    followed, others = (
        FollowedWork(*(column[each] for column in columns)) for each in (is_followed, ~is_followed)
    )
    return followed, others


def follow_work(
    speculator: FollowingProposer, followed: FollowedWork, others: FollowedWork, take: TakeStates
) -> None:
    """Let a speculator follow a step, whose states `take` returns."""
    if len(others.rows):
        speculator.skip(others.rows, others.starts)
    if len(followed.rows):
        speculator.follow(followed, take)
