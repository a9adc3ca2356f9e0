"""Steps that are launched on a device and answered later."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tgis.pb import shard_pb2 as pb
from tgis.shard.kernels.cuda.step_state import Flag
from tgis.shard.runner import step_response
from tgis.shard.runner.device.details.copies import PendingDetails
from tgis.shard.runner.device.device_table import SampledRows
from tgis.shard.runner.device.drafts.followed_steps import FollowedStep
from tgis.shard.runner.device.stream import Event, StreamTimer
from tgis.shard.runner.device.uploads import PinnedSlot, Words
from tgis.shard.runner.row_table import Integers
from tgis.shard.runner.step_response import Problem, SampledTokens, report_problem


class Clock:
    """Latest time at which a step was known to have finished on the device."""

    def __init__(self) -> None:
        self.last_ns = 0


class CopiedAnswers(NamedTuple):
    """Answers of a step, int32 [n, 2] as `sample` writes them, which the device copies to a pinned slot."""

    sampled: SampledRows
    at: Integers  # [num_sampled], indices of the rows' answers
    slot: PinnedSlot
    event: Event  # after the copy

    def wait(self) -> Words:
        """Wait until the device has computed the step. Return the rows' answers, [num_sampled, 2]."""
        self.event.wait()
        return self.slot.memory.numpy().reshape(-1, 2)[self.at]  # a copy, because the slot is reused


class StepTiming(NamedTuple):
    clock: Clock
    began_ns: int
    timers: Sequence[StreamTimer]
    """Timers of the work by which a speculator followed earlier steps while this one was launched."""

    def write(self, response: pb.StepResponse) -> None:
        """Write the durations of the step, which has just finished."""
        now = time.perf_counter_ns()
        response.forward_ns = now - max(self.began_ns, self.clock.last_ns)
        self.clock.last_ns = now
        response.follow_ns = sum(timer.read_ns() for timer in self.timers)


class PendingStep:
    """`Pending` step.

    The first thread that needs the answers finishes the step: the answering thread, or the launching thread
    if a later step depends on them."""

    def __init__(
        self,
        response: pb.StepResponse,
        is_answering: bool,
        copied: CopiedAnswers,
        timing: StepTiming,
        details: PendingDetails | None,
        followed: FollowedStep | None,
        num_proposed: Mapping[int, int],
    ):
        """Create a step. `details` are those that the response reports. `followed` has the work that a
        speculator follows, and `num_proposed` the number of drafts that the shard proposed, by row."""
        self.sampled = copied.sampled
        self.followed = followed
        self._num_proposed = num_proposed
        self._response = response
        self._is_answering = is_answering
        self._copied = copied
        self._timing = timing
        self._details = details
        self._lock = threading.Lock()
        self._answers: Words | None = None

    @property
    def is_finished(self) -> bool:
        return self._answers is not None

    @property
    def is_followed(self) -> bool:
        """True if a speculator follows a row of the step."""
        return self.followed is not None and len(self.followed.followed.rows) > 0

    def answer(self) -> pb.StepResponse:
        self.finish()
        return self._response

    def finish(self) -> Words:
        """Wait until the device has computed the step. Return the rows' answers, [num_sampled, 2]."""
        with self._lock:
            if self._answers is None:
                answers = self._copied.wait()
                self._timing.write(self._response)
                self._write(answers)
                self._answers = answers
            return self._answers

    def _write(self, answers: Words) -> None:
        if self._details is not None:
            self._details.write_inputs(self._response)
        if not len(answers):
            return
        rows = self.sampled.rows
        flags = self.sampled.read_flags(answers[:, 1])
        parts = list(self._split_rounds(answers))
        self._response.digest = step_response.digest(parts)
        if self._is_answering:
            step_response.write_sampled(self._response, parts, self._num_proposed)
        for row in rows[np.flatnonzero(flags & Flag.UNUSABLE)].tolist():
            report_problem(self._response, Problem(row, step_response.NOT_FINITE), self._is_answering)

    def _split_rounds(self, answers: Words) -> Iterator[SampledTokens]:
        """Yield the tokens of the first round of sampling, and of each further one that has any."""
        is_sampled = (answers[:, 1] & Flag.SAMPLED) != 0
        rounds = self.sampled.rounds
        numbers = np.zeros(len(answers), np.int64) if rounds is None else rounds
        num_rounds = 1 + int(numbers[is_sampled].max(initial=0))
        for number in range(num_rounds):
            kept = np.flatnonzero(is_sampled & (numbers == number))
            token_ids, flags = answers[kept].T
            details = self._details and self._details.describe(kept, self._copied.at)
            ended = (flags & Flag.ENDED) != 0
            yield SampledTokens(kept, self.sampled.rows[kept], token_ids, ended, details, [])
