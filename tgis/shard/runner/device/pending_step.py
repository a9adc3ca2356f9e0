"""Steps that are launched on a device and answered later."""

import threading
import time

import numpy as np

from tgis.pb import shard_pb2 as pb
from tgis.shard.kernels.cuda.step_state import Flag
from tgis.shard.runner import step_response
from tgis.shard.runner.device.details.copies import PendingDetails
from tgis.shard.runner.device.device_table import SampledRows
from tgis.shard.runner.device.stream import Event
from tgis.shard.runner.device.uploads import PinnedSlot, Words
from tgis.shard.runner.row_table import Integers
from tgis.shard.runner.step_response import Problem, SampledTokens, report_problem


class Clock:
    """Latest time at which a step was known to have finished on the device."""

    def __init__(self) -> None:
        self.last_ns = 0


class PendingStep:
    """`Pending` step. The device copies its answers, int32 [n, 2] as `sample` writes them, to a pinned slot.

    The first thread that needs the answers finishes the step: the answering thread, or the launching thread
    if a later step depends on them."""

    def __init__(
        self,
        response: pb.StepResponse,
        is_answering: bool,
        sampled: SampledRows,
        at: Integers,
        slot: PinnedSlot,
        event: Event,
        clock: Clock,
        details: PendingDetails | None = None,
    ):
        """Create a step whose rows have their answers at the indices `at` [num_sampled]. `details` are those
        that the response reports."""
        self.sampled = sampled
        self._response = response
        self._is_answering = is_answering
        self._at = at
        self._slot = slot
        self._event = event
        self._clock = clock
        self._details = details
        self._began_ns = time.perf_counter_ns()
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
                answers = copied[self._at]  # a copy, because the slot is reused
                self._write(answers)
                self._answers = answers
            return self._answers

    def _measure(self) -> None:
        now = time.perf_counter_ns()
        self._response.forward_ns = now - max(self._began_ns, self._clock.last_ns)
        self._clock.last_ns = now

    def _write(self, answers: Words) -> None:
        if self._details is not None:
            self._details.write_inputs(self._response)
        if not len(answers):
            return
        rows = self.sampled.rows
        token_ids = answers[:, 0]
        flags = answers[:, 1]
        kept = np.flatnonzero(flags & Flag.SAMPLED)
        ended = (flags[kept] & Flag.ENDED) != 0
        details = self._details and self._details.describe(kept, self._at)
        tokens = SampledTokens(kept, rows[kept], token_ids[kept], ended, details, [])
        self._response.digest = step_response.digest([tokens])
        if self._is_answering:
            step_response.write_sampled(self._response, [tokens], {})
        for row in rows[np.flatnonzero(flags & Flag.UNUSABLE)].tolist():
            report_problem(self._response, Problem(row, step_response.NOT_FINITE), self._is_answering)
