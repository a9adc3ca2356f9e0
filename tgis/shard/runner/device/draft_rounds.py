"""Sampling of steps with drafts, in rounds: the first one samples each row once, and each further round
samples the rows whose last sampled token is the next draft."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.step_state import RowState, StagedStep
from tgis.shard.runner.row_table import Integers


def number_rounds(sampled_rows: Integers) -> Integers:
    """Return the round of each sample, from 0. Samples of a row are one after the other."""
    at = np.arange(len(sampled_rows))
    is_first = np.diff(sampled_rows, prepend=-1) != 0
    return at - np.maximum.accumulate(np.where(is_first, at, 0))


class RoundMemory(NamedTuple):
    """Results of a further round."""

    rows: Tensor  # int32 [num_sampled], sampled rows; idle where the round samples nothing
    answers: Tensor  # int32 [num_sampled, 2], see `sample`

    @classmethod
    def allocate(cls, num_sampled: int, device: torch.device) -> "RoundMemory":
        rows = torch.empty(num_sampled, dtype=torch.int32, device=device)
        return cls(rows, torch.empty((num_sampled, 2), dtype=torch.int32, device=device))

    def take(self, count: int) -> "RoundMemory":
        return RoundMemory(self.rows[:count], self.answers[:count])


def sample_next(
    kernels: Implementations,
    state: RowState,
    staged: StagedStep,
    logits: Tensor,
    answers: Tensor,
    memory: RoundMemory,
) -> None:
    """Do a further round. `answers` has the answers of all rounds so far, and receives those of this one: no
    sample has more than one. The logits of samples of later rounds do not change."""
    kernels.accept_drafts(staged, state, answers, memory.rows)
    kernels.sample(logits, state, memory.rows, memory.answers)
    answers.add_(memory.answers)
