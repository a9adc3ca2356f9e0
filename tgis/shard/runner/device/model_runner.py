"""Model runner for a device that computes steps while the host prepares the next ones."""

import time
from collections import deque

import numpy as np
import torch
from torch import Tensor

from tgis import failpoints
from tgis.pb import shard_pb2 as pb
from tgis.shard.kernels.cuda.step_state import MAX_TOPS, DeviceDetails
from tgis.shard.models.interface import EncodingModel
from tgis.shard.runner.batch_builder import BatchBuilder, Work
from tgis.shard.runner.columns import read_column
from tgis.shard.runner.device.details.copies import DetailCopies
from tgis.shard.runner.device.details.prompt_tokens import PromptDetails
from tgis.shard.runner.device.device_step import DeviceModel
from tgis.shard.runner.device.device_table import SampledRows
from tgis.shard.runner.device.drafts.followed_steps import FollowedStep, FollowedSteps
from tgis.shard.runner.device.pending_step import Clock, CopiedAnswers, PendingStep, StepTiming
from tgis.shard.runner.device.sampling.mask_uploads import MaskUploads
from tgis.shard.runner.device.sampling.sampling_queue import SamplingQueue
from tgis.shard.runner.device.step_queue import QueuedStep, StepQueue
from tgis.shard.runner.device.stream import DeviceStream, StreamTimer
from tgis.shard.runner.device.uploads import NUM_SLOTS, PinnedRing, copy_numbers
from tgis.shard.runner.forward import Outputs
from tgis.shard.runner.host_sampler import HostSampler
from tgis.shard.runner.interface import Pending, RunnerParts
from tgis.shard.runner.model_runner import ComputedStep, close_and_open, list_saves, open_states
from tgis.shard.runner.proposer import FollowingProposer
from tgis.shard.runner.row_table import Integers
from tgis.shard.runner.step_response import report_problem
from tgis.shard.sampling.grammar import DraftMasks


class DeviceModelRunner:
    """`ModelRunner` that queues a step when it is launched, unless the host must sample in it.

    Everything except waiting for answers runs on the launching thread."""

    max_pending = 2

    def __init__(
        self,
        parts: RunnerParts,
        on: DeviceModel,
        stream: DeviceStream,
        builder: BatchBuilder,
        steps: StepQueue,
        speculator: FollowingProposer | None = None,
    ) -> None:
        """Create a runner. `speculator` is the proposer of the builder."""
        self.info = parts.info
        self.adapters = parts.adapters
        self.model = on.model
        self._on = on
        self._stream = stream
        self._table = table = steps.table
        self._builder = builder
        self._steps = steps
        self.graphs = steps.graphs
        self._guides = parts.guides
        self._sampling = SamplingQueue(table, parts.guides, MaskUploads(stream, on.state))
        max_rows = on.state.idle_row
        self._answer_slots = PinnedRing(stream, max_rows * 2)
        self._details = DetailCopies(table, stream, max_rows * (3 + 2 * MAX_TOPS))
        self._followed = None if speculator is None else FollowedSteps(speculator, table, stream)
        self._is_answering = self.info.rank == 0
        self._inputs = PromptDetails(on, table, steps.uploads, stream, self._is_answering)
        self._sampler = HostSampler(self.model, self._compute, self._table, self._guides, self._is_answering)
        self._launched = deque[PendingStep]()  # steps whose answers have not been applied to the table
        self._clock = Clock()

    def reset(self) -> None:
        self._launched.clear()
        self._table.reset()
        self._guides.reset()
        if self._followed is not None:
            self._followed.reset()

    def launch(self, request: pb.StepRequest) -> Pending:
        with torch.inference_mode():
            return self._launch(request)

    def _launch(self, request: pb.StepRequest) -> Pending:
        began = time.perf_counter_ns()
        response = pb.StepResponse(step_id=request.step_id)
        self._settle(request)
        assert len(self._launched) < NUM_SLOTS, "too many steps are pending"
        for problem in close_and_open(request, self._table, self._guides):
            report_problem(response, problem, self._is_answering)
        if self._followed is not None and request.opened_rows:
            self._followed.open_rows(np.array([message.row for message in request.opened_rows]))
        self._finish_drafts(request)
        self._open_states(request)
        self._steps.update_slots()
        failpoints.hit("shard.before_forward", lambda: self._table.label_rows(request))
        host_path = self._table.find_host_path(request)
        if host_path:
            self._wait_for_answers()
        has_encoded = self._encode(request)
        work = self._builder.find_work(request)
        if work is None:
            self._save_states(request)
            self._steps.send_updates()
            response.forward_ns = time.perf_counter_ns() - began
            return ComputedStep(response)
        draft_masks = None if host_path else self._sampling.start_masking(work)
        step = self._steps.queue(work, has_encoded, is_followed=any(request.followed))
        followed = None if self._followed is None else self._followed.keep(request, work, step.states)
        self._save_states(request)
        response.path = host_path or step.path
        if not host_path:
            return self._queue_rest(
                work, step, draft_masks, response, followed, began, bool(request.max_drafts)
            )
        self._sampler.answer(work, step.adapters, self._wait_for_outputs(step), response)
        response.follow_ns = sum(timer.read_ns() for timer in self._take_timers())
        self._follow(followed)
        response.forward_ns = time.perf_counter_ns() - began
        return ComputedStep(response)

    def _settle(self, request: pb.StepRequest) -> None:
        """Apply the answers that are known. If there is a speculator, the requests alone decide which answers
        are applied before a step, so that all ranks propose the same."""
        if self._followed is None:
            self._apply_answers()
            return
        is_closing = bool(request.closed_rows) and any(pending.is_followed for pending in self._launched)
        needs_all = is_closing or bool(request.max_drafts)
        while self._launched and (needs_all or len(self._launched) >= self.max_pending):
            self._apply_first()

    def _open_states(self, request: pb.StepRequest) -> None:
        """Queue the setting of the states of the opened rows."""
        states = self._on.states
        if states is not None and request.opened_rows:
            self._stream.run(lambda: open_states(request, states))

    def _save_states(self, request: pb.StepRequest) -> None:
        """Queue the copies of states that the step requests, after its forward pass."""
        states = self._on.states
        saves = [] if states is None else list_saves(request, self._table)
        if states is not None and saves:
            self._stream.run(lambda: states.copy_all(saves))

    def _encode(self, request: pb.StepRequest) -> bool:
        """Queue the encoder's work. Return False if there is none."""
        inputs = self._builder.pack_encoder(request.opened_rows)
        if inputs is None:
            return False
        model = self.model
        attention = self._on.attention
        assert isinstance(model, EncodingModel), "encoder inputs for a model without an encoder"
        self._stream.run(lambda: model.encode(inputs, attention))
        return True

    def _queue_rest(
        self,
        work: Work,
        step: QueuedStep,
        draft_masks: DraftMasks | None,
        response: pb.StepResponse,
        followed: FollowedStep | None,
        launched_ns: int,
        has_proposed: bool,
    ) -> PendingStep:
        """Queue a step's sampling and the copy of its answers. The step was launched at `launched_ns`, which
        is when it began if the speculator worked for it."""
        sampled = self._table.name_sampled(work)
        slot = self._answer_slots.take(len(step.answers) * 2)
        inputs = self._inputs.queue(work.input_spans, step.outputs, step.adapters)
        described = None
        if len(sampled.rows):
            self._send_masks(sampled.first_rows, response)
            described = self._queue_sampling(sampled, step, draft_masks)
            self._queue_answers(step, slot.memory)
        details = None
        if self._is_answering and (inputs or described is not None):
            details = self._details.queue(inputs, sampled.rows, described)
        event = slot.last_use = self._stream.record()
        self._table.plan_tokens(sampled.first_rows)
        timers = self._take_timers()
        began_ns = launched_ns if timers or has_proposed else time.perf_counter_ns()
        pending = PendingStep(
            response,
            self._is_answering,
            CopiedAnswers(sampled, step.sampled_at, slot, event),
            StepTiming(self._clock, began_ns, timers),
            details=details,
            followed=followed,
            num_proposed=work.num_proposed,
        )
        self._launched.append(pending)
        return pending

    def _queue_sampling(
        self, sampled: SampledRows, step: QueuedStep, draft_masks: DraftMasks | None
    ) -> DeviceDetails | None:
        """Queue a step's sampling. Return the memory of the details of its tokens, if any row wants them."""
        is_detailed = self._is_answering and bool(self._table.wants_details[sampled.rows].any())
        self._sampling.queue(sampled, step, draft_masks, is_detailed)
        return step.details().first(int(step.sampled_at.max()) + 1) if is_detailed else None

    def _finish_drafts(self, request: pb.StepRequest) -> None:
        """Wait for the answers on which the rows of a step depend: those of rows that have drafts in it, and
        of rows that had drafts. The router has them already, so they are late only on other ranks."""
        if not request.num_drafts and all(pending.sampled.rounds is None for pending in self._launched):
            return
        rows = read_column(request.rows)
        drafted = rows[read_column(request.num_drafts) > 0] if request.num_drafts else rows[:0]

        def is_needed(sampled: SampledRows) -> bool:
            current = self._table.are_current(sampled)
            if np.isin(drafted, sampled.rows[current]).any():
                return True
            if sampled.rounds is None:
                return False
            return bool(np.isin(rows, sampled.rows[current & (sampled.rounds > 0)]).any())

        while any(is_needed(pending.sampled) for pending in self._launched):
            self._apply_first()

    def _queue_answers(self, step: QueuedStep, memory: Tensor) -> None:
        answers = step.answers[: int(step.sampled_at.max()) + 1].view(-1)
        target = memory[: len(answers)]
        self._stream.run(lambda: copy_numbers(answers, target))

    def _send_masks(self, rows: Integers, response: pb.StepResponse) -> None:
        """Send the masks of the rows that have some, once the tokens of pending steps are known."""
        masked = self._sampling.find_masked(rows)
        if not len(masked):
            return
        while any(np.isin(masked, pending.sampled.rows).any() for pending in self._launched):
            self._apply_first()
        for problem in self._sampling.send_masks(masked):
            report_problem(response, problem, self._is_answering)

    def _compute(self, rows: Integers) -> Outputs:
        """Compute the last tokens of rows again and wait for the result."""
        return self._wait_for_outputs(self._steps.queue(self._builder.find_last(rows)))

    def _wait_for_outputs(self, step: QueuedStep) -> Outputs:
        self._stream.record().wait()
        return step.outputs()

    def _wait_for_answers(self) -> None:
        while self._launched:
            self._apply_first()

    def _apply_answers(self) -> None:
        """Apply the answers of finished steps."""
        while self._launched and self._launched[0].is_finished:
            self._apply_first()

    def _apply_first(self) -> None:
        """Wait for the first launched step. Apply its answers to the table and the guides."""
        pending = self._launched.popleft()
        answers = pending.finish()
        rows, token_ids, ended = self._table.apply(pending.sampled, answers[:, 0], answers[:, 1])
        self._guides.advance(rows, token_ids, ended)
        self._follow(pending.followed)

    def _follow(self, step: FollowedStep | None) -> None:
        if self._followed is not None and step is not None:
            self._followed.follow(step)

    def _take_timers(self) -> list[StreamTimer]:
        return [] if self._followed is None else self._followed.take_timers()
