"""Model runner for a device that computes steps while the host prepares the next ones."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tgis import failpoints
from tgis.pb import shard_pb2 as pb
from tgis.shard.kernels.cuda.functions import dependent_launch
from tgis.shard.kernels.cuda.step_state import MAX_TOPS, DeviceDetails, StagedStep
from tgis.shard.layers.lora import Adapter, TokenAdapters
from tgis.shard.models.interface import EncodingModel
from tgis.shard.runner.batch_builder import BatchBuilder, Work
from tgis.shard.runner.columns import read_column
from tgis.shard.runner.device.adapters.slot_assignments import SlotAssignments
from tgis.shard.runner.device.details.copies import DetailCopies
from tgis.shard.runner.device.details.prompt_tokens import PromptDetails
from tgis.shard.runner.device.device_rows import RowUpdates, apply_updates
from tgis.shard.runner.device.device_step import DeviceModel, EagerStep, FixedSteps
from tgis.shard.runner.device.device_table import SampledRows
from tgis.shard.runner.device.drafts.captured_speculator import CapturedSpeculator
from tgis.shard.runner.device.drafts.followed_steps import FollowedStates, FollowedStep, FollowedSteps
from tgis.shard.runner.device.graphs import CapturedStep, CaptureLimits, StepGraphs, StepParts
from tgis.shard.runner.device.masks import MaskUploads
from tgis.shard.runner.device.pending_step import Clock, CopiedAnswers, PendingStep, StepTiming
from tgis.shard.runner.device.step_packer import NO_WORDS, StagedArrays, StagedSize, StepPacker
from tgis.shard.runner.device.stream import DeviceStream, StreamTimer
from tgis.shard.runner.device.uploads import NUM_SLOTS, PinnedRing, Uploads, Words, copy_numbers
from tgis.shard.runner.forward import Outputs
from tgis.shard.runner.graph_sizes import GraphSize
from tgis.shard.runner.host_sampler import HostSampler
from tgis.shard.runner.interface import Pending, RunnerParts
from tgis.shard.runner.model_runner import ComputedStep, close_and_open, list_saves, open_states
from tgis.shard.runner.proposer import FollowingProposer
from tgis.shard.runner.row_table import Integers
from tgis.shard.runner.step_response import Problem, report_problem
from tgis.shard.sampling.grammar import DraftMasks
from tgis.shard.sampling.watermark import pack_green

STAGED_WORDS = 1 << 16  # initial size of an upload slot; a larger upload allocates a larger slot


class QueuedStep(NamedTuple):
    """Step whose forward pass is queued."""

    path: pb.StepPath
    sampled_at: Integers  # [num_sampled], indices of the samples' logits and answers
    adapters: TokenAdapters | None
    outputs: Callable[[], Outputs]  # valid after the forward pass
    # Queue a round of sampling, see `device_step`. They write `answers` and, with True, `details`.
    sample: Callable[[bool], None]
    sample_next: Callable[[bool], None]
    answers: Tensor  # int32 [at least num_sampled, 2]
    details: Callable[[], DeviceDetails]  # memory of at least num_sampled
    states: FollowedStates | None = None  # for a speculator that reads them


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
        packer: StepPacker,
        memory_left: Callable[[], int],
        speculator: FollowingProposer | None = None,
    ) -> None:
        """Create a runner. `memory_left` returns the free bytes of the device, and `speculator` is the
        proposer of the builder."""
        self.info = parts.info
        self.adapters = parts.adapters
        self.model = on.model
        self._on = on
        self._stream = stream
        self._table = packer.table
        self._builder = builder
        self._packer = packer
        self._guides = parts.guides
        self._guides.unpacks_masks = False
        max_rows = on.state.idle_row
        self._uploads = Uploads(stream, STAGED_WORDS)
        self._masks = MaskUploads(stream, on.state)
        self._answer_slots = PinnedRing(stream, max_rows * 2)
        self._details = DetailCopies(self._table, stream, max_rows * (3 + 2 * MAX_TOPS))
        self._fixed = FixedSteps(on, packer, max_rows, stream)
        row_adapters = self._table.row_adapters
        self._slots = None if on.slots is None else SlotAssignments(on.slots, row_adapters)
        proposals = speculator.graphs if isinstance(speculator, CapturedSpeculator) else None
        self.graphs = StepGraphs(
            stream,
            self._make_parts,
            CaptureLimits(memory_left, parts.group.min),
            has_drafts=parts.has_drafts,
            proposals=proposals,
            simplify=partial(dependent_launch.stop, stream.device),
        )
        self._followed = None if speculator is None else FollowedSteps(speculator, self._table, stream)
        self._is_answering = self.info.rank == 0
        self._inputs = PromptDetails(on, self._table, self._uploads, stream, self._is_answering)
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
        self._update_slots()
        failpoints.hit("shard.before_forward", lambda: self._table.label_rows(request))
        host_path = self._table.find_host_path(request)
        if host_path:
            self._wait_for_answers()
        has_encoded = self._encode(request)
        work = self._builder.find_work(request)
        if work is None:
            self._save_states(request)
            self._send_updates()
            response.forward_ns = time.perf_counter_ns() - began
            return ComputedStep(response)
        draft_masks = None if host_path else self._start_masking(work)
        step = self._queue_forward(work, has_encoded, is_followed=any(request.followed))
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

    def _update_slots(self) -> None:
        """Queue the changes of slots of adapters. Queued steps may still read the matrices of released
        ones, which are freed after these steps."""
        slots = self._on.slots
        if self._slots is None or slots is None:
            return
        for change in self._slots.update():
            if change.released is not None:
                self._stream.run(partial(_forget, change.released))
            else:
                [words] = self._uploads.send([change.words])
                row = slots.memory[change.slot].view(torch.int32)
                self._stream.run(partial(copy_numbers, words, row))

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

    def _queue_forward(self, work: Work, has_encoded: bool = False, is_followed: bool = False) -> QueuedStep:
        slots, adapters = self._find_adapters(work)
        arrays, size = self._packer.pack_step(work, self._table.take_blocks(), slots)
        virtual = self._packer.virtual_tokens(work)
        captured = self._find_captured(arrays, size)
        path = pb.STEP_PATH_GRAPH
        if has_encoded or virtual is not None or work.input_spans:
            path = pb.STEP_PATH_PROMPT
        elif adapters is not None or (len(slots) and not self.graphs.have_adapters):
            path = pb.STEP_PATH_ADAPTER
        elif not self.graphs.sizes:
            path = pb.STEP_PATH_MODEL
        elif captured is None:
            path = pb.STEP_PATH_SIZE
        if path != pb.STEP_PATH_GRAPH and size.num_tokens > size.num_single:
            path = pb.STEP_PATH_PROMPT
        if path == pb.STEP_PATH_GRAPH:
            assert captured is not None
            return self._replay_forward(arrays, captured, size.num_single, work.drafts is not None)
        staged = StagedStep(*self._send_step(arrays))
        if self._slots is not None:
            size = size._replace(max_rank=self._slots.max_rank)
        on = self._on if is_followed else replace(self._on, reader=None)
        step = EagerStep(on, staged, size, virtual, adapters)
        self._stream.run(step.forward)

        def sample(is_detailed: bool) -> None:
            details = step.details if is_detailed else None
            self._stream.run(lambda: step.sample(details))

        def sample_next(is_detailed: bool) -> None:
            details = step.details if is_detailed else None
            self._stream.run(lambda: step.sample_next(details))

        at = np.arange(len(work.sampled_rows))
        states = None if on.reader is None else FollowedStates(step.states, np.arange(size.num_tokens))
        answers = step.answers, lambda: step.details
        return QueuedStep(path, at, step.adapters, step.outputs, sample, sample_next, *answers, states)

    def _find_adapters(self, work: Work) -> tuple[Words, TokenAdapters | None]:
        """Return the slot of each sequence's adapter, empty if there are none, or the adapters of the tokens
        if one of them fits no slot."""
        adapters = self._table.row_adapters
        if not adapters.has_any(work.rows):
            return NO_WORDS, None
        slots = None if self._slots is None else self._slots.find(work.rows)
        return (NO_WORDS, self._packer.token_adapters(work)) if slots is None else (slots, None)

    def _find_captured(self, arrays: StagedArrays, size: StagedSize) -> CapturedStep | None:
        has_adapters = len(arrays.adapter_slots) > 0
        captured = self.graphs.find(size.num_single, size.num_tokens - size.num_single, has_adapters)
        if captured is None or not self._packer.find_capacity(captured.size).holds(arrays):
            return None
        return captured

    def _replay_forward(
        self, arrays: StagedArrays, captured: CapturedStep, num_single: int, has_drafts: bool
    ) -> QueuedStep:
        self._send_updates()
        self._uploads.send_to(self._fixed.staged, self._packer.pad_step(arrays, captured.size, num_single))
        captured.forward.replay()
        has_prompts = captured.size.num_prompt_tokens > 0
        count = len(arrays.sampled_x)
        at = np.arange(count) if has_prompts else arrays.sampled_x.astype(np.int64)

        def outputs() -> Outputs:
            logits = self._fixed.logits
            is_first = has_prompts or count == len(arrays.token_rows)
            return Outputs(logits, logits[:count] if is_first else logits[torch.from_numpy(at)])

        path = pb.STEP_PATH_GRAPH
        if captured.sample_next is None and has_drafts:
            path = pb.STEP_PATH_DRAFTS

        def sample(is_detailed: bool) -> None:
            (captured.sample_detailed if is_detailed else captured.sample).replay()

        def sample_next(is_detailed: bool) -> None:
            parts = captured.parts
            if captured.sample_next is not None:
                captured.sample_next[is_detailed].replay()
            else:
                self._stream.run(parts.sample_next_detailed if is_detailed else parts.sample_next)

        fixed = self._fixed
        states = self._find_states(captured.size, len(arrays.token_rows), num_single)
        answers = fixed.answers, lambda: fixed.details
        return QueuedStep(path, at, None, outputs, sample, sample_next, *answers, states)

    def _find_states(self, size: GraphSize, num_tokens: int, num_single: int) -> FollowedStates | None:
        """Return the states of a replayed step. Prompts are after the tokens of all its rows."""
        if self._on.reader is None:
            return None
        at = np.arange(num_tokens)
        at[num_single:] += size.num_rows - num_single
        return FollowedStates(lambda: self._fixed.states[: size.num_tokens].clone(), at)

    def _send_step(self, arrays: StagedArrays) -> list[Tensor]:
        """Upload a step and the pending updates of rows."""
        updates = self._table.take_updates()
        sent = self._uploads.send([*arrays, *(updates or ())])
        if updates is not None:
            self._apply_updates(sent[len(arrays) :])
        return sent[: len(arrays)]

    def _send_updates(self) -> None:
        updates = self._table.take_updates()
        if updates is not None:
            self._apply_updates(self._uploads.send(updates))

    def _apply_updates(self, sent: list[Tensor]) -> None:
        updates = RowUpdates(*sent)
        state = self._on.state
        self._stream.run(torch.inference_mode()(lambda: apply_updates(updates, state)))

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
        step.sample(is_detailed)
        if draft_masks is not None:
            self._sample_drafts(sampled, step, draft_masks, is_detailed)
        return step.details().first(int(step.sampled_at.max()) + 1) if is_detailed else None

    def _sample_drafts(
        self, sampled: SampledRows, step: QueuedStep, draft_masks: DraftMasks, is_detailed: bool
    ) -> None:
        """Queue a round of sampling for each draft of the row with the most drafts."""
        greens = self._masks.send_green_rounds(self._list_greens(sampled))
        masks = self._masks.send_rounds(draft_masks())
        for number in range(sampled.num_drafts):
            for queue in (*greens[number : number + 1], *masks[number : number + 1]):
                queue()
            step.sample_next(is_detailed)

    def _start_masking(self, work: Work) -> DraftMasks | None:
        """Start to compute the grammar masks after the drafts of a step. Return None if it has none."""
        if work.drafts is None:
            return None
        drafts = dict[int, list[int]]()
        at = np.flatnonzero(work.drafts >= 0)
        for row, token_id in zip(work.sampled_rows[at].tolist(), work.drafts[at].tolist(), strict=True):
            drafts.setdefault(row, []).append(token_id)
        return self._guides.start_masking(drafts)

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
        """Send the grammar masks and green lists of rows, once the tokens of pending steps are known."""
        masked = rows[self._guides.has_guide(rows) | self._table.is_marked[rows]]
        if not len(masked):
            return
        while any(np.isin(masked, pending.sampled.rows).any() for pending in self._launched):
            self._apply_first()
        live = masked[~self._table.ended[masked]]
        self._send_greens(live[self._table.is_marked[live]])
        self._send_grammar_masks(live[self._guides.has_guide(live)], response)

    def _send_greens(self, rows: Integers) -> None:
        if len(rows):
            self._masks.send_greens(rows, self._draw_greens(rows, self._table.lengths[rows]))

    def _list_greens(self, sampled: SampledRows) -> list[tuple[Integers, Words]]:
        """Return for each further round its rows with a watermark, and their green lists."""
        assert sampled.rounds is not None
        is_marked = self._table.is_marked[sampled.rows]
        rounds = sampled.rounds[is_marked]
        rows, positions = sampled.rows[is_marked], sampled.positions[is_marked]
        last = int(rounds.max(initial=0))
        parts = [rounds == number for number in range(1, last + 1)]
        return [(rows[at], self._draw_greens(rows[at], positions[at])) for at in parts]

    def _draw_greens(self, rows: Integers, positions: Integers) -> Words:
        """Return the green lists of the rows' tokens at these positions, after the token or draft before."""
        table = self._table
        previous = table.token_ids[rows, positions - 1]
        return pack_green(previous, table.rows["watermark_gamma"][rows], table.limits.vocab_size)

    def _send_grammar_masks(self, live: Integers, response: pb.StepResponse) -> None:
        if not len(live):
            return
        masks, problems = self._guides.pack_masks(live)
        failed = live[list(problems)]
        self._masks.send(live[masks.at], masks, failed)
        for i, text in problems.items():
            problem = Problem(int(live[i]), text, pb.RowError.CAUSE_GRAMMAR)
            report_problem(response, problem, self._is_answering)
        self._table.fail(failed)

    def _compute(self, rows: Integers) -> Outputs:
        """Compute the last tokens of rows again and wait for the result."""
        return self._wait_for_outputs(self._queue_forward(self._builder.find_last(rows)))

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

    def _make_parts(self, size: GraphSize) -> StepParts:
        return self._fixed.make_parts(size, self._uploads)


def _forget(adapter: Adapter) -> None:
    """Do nothing. The queue has held the adapter until now."""
