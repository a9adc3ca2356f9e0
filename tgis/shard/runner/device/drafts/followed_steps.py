"""Lets a speculator follow the steps of a device, once their answers are known."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tgis.pb import shard_pb2 as pb
from tgis.shard.memory.placing import place
from tgis.shard.runner.batch_builder import Work
from tgis.shard.runner.device.device_table import DeviceTable
from tgis.shard.runner.device.stream import DeviceStream, StreamTimer
from tgis.shard.runner.proposer import FollowedWork, FollowingProposer
from tgis.shard.runner.proposers.followed_work import follow_work, split_followed
from tgis.shard.runner.row_table import Booleans, Integers


@dataclass
class FollowedStates:
    """States of a step's tokens that a speculator reads."""

    compute: Callable[[], Tensor]
    """Function that returns states, float32 [any, width], when the step's forward pass is computed."""
    tokens_at: Integers  # [num_tokens], index of the state after each token
    kept: Tensor | None = None

    def keep(self) -> None:
        self.kept = self.compute()

    def take(self, at: Integers) -> Tensor:
        """Return the states after the tokens at indices [n], once they are computed."""
        assert self.kept is not None, "the states of the step are not computed"
        return self.kept[place(self.tokens_at[at], self.kept.device)]


@dataclass(frozen=True)
class FollowedStep:
    """Work of a launched step that a speculator follows, and the other work."""

    followed: FollowedWork
    others: FollowedWork
    states: FollowedStates | None
    numbers: tuple[Integers, Integers]  # of the sequences of both, as in `DeviceTable`


class FollowedSteps:
    """Steps of a table's rows that a speculator follows."""

    def __init__(self, speculator: FollowingProposer, table: DeviceTable, stream: DeviceStream) -> None:
        self._speculator = speculator
        self._table = table
        self._stream = stream
        self._timers: list[StreamTimer] = []

    def reset(self) -> None:
        self._speculator.reset()
        self._timers.clear()

    def open_rows(self, rows: Integers) -> None:
        self._speculator.open_rows(rows)

    def keep(self, request: pb.StepRequest, work: Work, states: FollowedStates | None) -> FollowedStep:
        """Queue the copy of a step's states after its forward pass."""
        followed, others = split_followed(request, work)
        if states is not None and len(followed.rows):
            self._stream.run(torch.inference_mode()(states.keep))
        numbers = self._table.number_sequences(followed.rows), self._table.number_sequences(others.rows)
        return FollowedStep(followed, others, states, numbers)

    def follow(self, step: FollowedStep) -> None:
        """Follow a step whose answers have been applied to the table. Rows that have got another sequence
        meanwhile are left out."""
        parts = zip((step.followed, step.others), step.numbers, strict=True)
        followed, others = (
            _select(work, self._table.number_sequences(work.rows) == numbers) for work, numbers in parts
        )
        is_timed = len(followed.rows) and not self._have_prompts(followed)
        timer = self._stream.start_timer() if is_timed else None
        follow_work(self._speculator, followed, others, _refuse if step.states is None else step.states.take)
        if timer is not None:
            timer.stop()
            self._timers.append(timer)

    def take_timers(self) -> list[StreamTimer]:
        """Return the timers of the steps that were followed since the last call. Steps with prompts have
        none, because the router learns from steps without prompts only."""
        timers = self._timers
        self._timers = []
        return timers

    def _have_prompts(self, work: FollowedWork) -> bool:
        return bool(np.any(work.starts < self._table.rows["opened_len"][work.rows]))


def _select(work: FollowedWork, are_current: Booleans) -> FollowedWork:
    return FollowedWork(*(column[are_current] for column in work))


def _refuse(at: Integers) -> Tensor:
    raise AssertionError("a draft model reads no states")
