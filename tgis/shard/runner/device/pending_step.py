"""Steps that were launched on a device and are answered by it."""

import threading
import time

import numpy as np

from tgis.pb import shard_pb2 as pb
from tgis.shard.kernels.cuda.step_state import Flag
from tgis.shard.runner import step_response
from tgis.shard.runner.device.device_table import SampledRows
from tgis.shard.runner.device.stream import Event
from tgis.shard.runner.device.uploads import PinnedSlot, Words
from tgis.shard.runner.row_table import Integers
from tgis.shard.runner.step_response import Problem, SampledTokens, report_problem


class Clock:
    """Time at which the device was last known to have finished a step."""

    def __init__(self) -> None:
        self.last_ns = 0


class PendingStep:
    """`Pending` whose answers, int32 [n, 2] as `sample` writes them, the device copies to a pinned slot.

    The step is finished by whoever needs its answers first: the thread that answers, or the one that launches
    a step which depends on them."""

    def __init__(
        self,
        response: pb.StepResponse,
        is_answering: bool,
        sampled: SampledRows,
        at: Integers,
        slot: PinnedSlot,
        event: Event,
        clock: Clock,
    ):
        """Set `at` [num_sampled] to the indices of the rows' answers."""
        self.sampled = sampled
        self._response, self._is_answering = response, is_answering
        self._at, self._slot, self._event = at, slot, event
        self._clock, self._began_ns = clock, time.perf_counter_ns()
        self._lock = threading.Lock()
        self._answers: Words | None = None

    @property
    def is_finished(self) -> bool:
        return self._answers is not None

    def answer(self) -> pb.StepResponse:
        self.finish()
        return self._response

    def finish(self) -> Words:
        """Wait until the device has computed the step. Return the rows' answers, [num_sampled, 2]."""
        with self._lock:
            if self._answers is None:
                self._event.wait()
                self._measure()
                copied = self._slot.memory.numpy().reshape(-1, 2)
                answers = copied[self._at]  # a copy, because the slot is used again
                self._write(answers)
                self._answers = answers
            return self._answers

    def _measure(self) -> None:
        now = time.perf_counter_ns()
        self._response.forward_ns = now - max(self._began_ns, self._clock.last_ns)
        self._clock.last_ns = now

    def _write(self, answers: Words) -> None:
        if not len(answers):
            return
        rows, token_ids, flags = self.sampled.rows, answers[:, 0], answers[:, 1]
        kept = np.flatnonzero(flags & Flag.SAMPLED)
        ended = (flags[kept] & Flag.ENDED) != 0
        tokens = SampledTokens(kept, rows[kept], token_ids[kept], ended, None, [])
        self._response.digest = step_response.digest([tokens])
        if self._is_answering:
            step_response.write_sampled(self._response, [tokens], {})
        for row in rows[np.flatnonzero(flags & Flag.UNUSABLE)].tolist():
            report_problem(self._response, Problem(row, step_response.NOT_FINITE), self._is_answering)
