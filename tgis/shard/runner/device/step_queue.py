"""Queues the forward passes of steps: as a captured graph if one fits, else kernel by kernel."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tgis.pb import shard_pb2 as pb
from tgis.shard.kernels.cuda.step_state import DeviceDetails, StagedStep
from tgis.shard.layers.lora import Adapter, TokenAdapters
from tgis.shard.models.interface import VirtualTokens
from tgis.shard.runner.batch_builder import Work
from tgis.shard.runner.device.adapters.slot_assignments import SlotAssignments
from tgis.shard.runner.device.device_rows import RowUpdates, apply_updates
from tgis.shard.runner.device.device_step import DeviceModel, EagerStep, FixedSteps
from tgis.shard.runner.device.drafts.followed_steps import FollowedStates
from tgis.shard.runner.device.graphs import CapturedStep, StepGraphs
from tgis.shard.runner.device.step_packer import NO_WORDS, StagedArrays, StagedSize, StepPacker
from tgis.shard.runner.device.stream import DeviceStream
from tgis.shard.runner.device.uploads import Uploads, Words, copy_numbers
from tgis.shard.runner.forward import Outputs
from tgis.shard.runner.graph_sizes import GraphSize
from tgis.shard.runner.row_table import Integers


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


class _PackedStep(NamedTuple):
    """Step in the host's memory."""

    arrays: StagedArrays
    size: StagedSize
    virtual: VirtualTokens | None
    adapters: TokenAdapters | None
    """Adapters of the tokens if one of them fits no slot."""
    has_drafts: bool


class StepQueue:
    def __init__(
        self,
        on: DeviceModel,
        stream: DeviceStream,
        packer: StepPacker,
        uploads: Uploads,
        fixed: FixedSteps,
        graphs: StepGraphs,
    ) -> None:
        """Create a queue. `fixed` has the memory of the steps of `graphs`."""
        self._on = on
        self._stream = stream
        self._packer = packer
        self.table = packer.table
        self.uploads = uploads
        self._fixed = fixed
        self.graphs = graphs
        adapters = self.table.row_adapters
        self._slots = None if on.slots is None else SlotAssignments(on.slots, adapters)

    def queue(self, work: Work, has_encoded: bool = False, is_followed: bool = False) -> QueuedStep:
        """Queue the forward pass, after the pending updates of rows. With `has_encoded`, its sequences have
        been encoded just now, and with `is_followed` a speculator may read its states."""
        slots, adapters = self._find_adapters(work)
        arrays, size = self._packer.pack_step(work, self.table.take_blocks(), slots)
        virtual = self._packer.virtual_tokens(work)
        packed = _PackedStep(arrays, size, virtual, adapters, work.drafts is not None)
        has_inputs = has_encoded or virtual is not None or bool(work.input_spans)
        captured = None if has_inputs or adapters is not None else self._find_captured(arrays, size)
        if captured is not None:
            return self._replay(packed, captured)
        return self._launch_kernels(packed, self._explain_path(packed, has_inputs), is_followed)

    def send_updates(self) -> None:
        """Queue the pending updates of rows."""
        updates = self.table.take_updates()
        if updates is not None:
            self._apply_updates(self.uploads.send(updates))

    def update_slots(self) -> None:
        """Queue the changes of slots of adapters. Queued steps may still read the matrices of released
        ones, which are freed after these steps."""
        slots = self._on.slots
        if self._slots is None or slots is None:
            return
        for change in self._slots.update():
            if change.released is not None:
                self._stream.run(partial(_forget, change.released))
            else:
                [words] = self.uploads.send([change.words])
                row = slots.memory[change.slot].view(torch.int32)
                self._stream.run(partial(copy_numbers, words, row))

    def _find_adapters(self, work: Work) -> tuple[Words, TokenAdapters | None]:
        """Return the slot of each sequence's adapter, empty if there are none, or the adapters of the tokens
        if one of them fits no slot."""
        adapters = self.table.row_adapters
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

    def _explain_path(self, packed: _PackedStep, has_inputs: bool) -> pb.StepPath:
        """Return why the step is not replayed."""
        arrays, size = packed.arrays, packed.size
        if has_inputs or size.num_tokens > size.num_single:
            return pb.STEP_PATH_PROMPT
        if packed.adapters is not None or (len(arrays.adapter_slots) and not self.graphs.have_adapters):
            return pb.STEP_PATH_ADAPTER
        return pb.STEP_PATH_SIZE if self.graphs.sizes else pb.STEP_PATH_MODEL

    def _launch_kernels(self, packed: _PackedStep, path: pb.StepPath, is_followed: bool) -> QueuedStep:
        arrays, size = packed.arrays, packed.size
        staged = StagedStep(*self._send_step(arrays))
        if self._slots is not None:
            size = size._replace(max_rank=self._slots.max_rank)
        on = self._on if is_followed else replace(self._on, reader=None)
        step = EagerStep(on, staged, size, packed.virtual, packed.adapters)
        self._stream.run(step.forward)
        states = None if on.reader is None else FollowedStates(step.states, np.arange(size.num_tokens))
        return QueuedStep(
            path=path,
            sampled_at=np.arange(len(arrays.sampled_x)),
            adapters=step.adapters,
            outputs=step.outputs,
            sample=lambda is_detailed: self._stream.run(partial(step.sample, is_detailed)),
            sample_next=lambda is_detailed: self._stream.run(partial(step.sample_next, is_detailed)),
            answers=step.answers,
            details=lambda: step.details,
            states=states,
        )

    def _send_step(self, arrays: StagedArrays) -> list[Tensor]:
        """Upload a step and the pending updates of rows."""
        updates = self.table.take_updates()
        sent = self.uploads.send([*arrays, *(updates or ())])
        if updates is not None:
            self._apply_updates(sent[len(arrays) :])
        return sent[: len(arrays)]

    def _apply_updates(self, sent: list[Tensor]) -> None:
        updates = RowUpdates(*sent)
        state = self._on.state
        self._stream.run(torch.inference_mode()(lambda: apply_updates(updates, state)))

    def _replay(self, packed: _PackedStep, captured: CapturedStep) -> QueuedStep:
        arrays, num_single = packed.arrays, packed.size.num_single
        self.send_updates()
        self.uploads.send_to(self._fixed.staged, self._packer.pad_step(arrays, captured.size, num_single))
        captured.forward.replay()
        has_prompts = captured.size.num_prompt_tokens > 0
        count = len(arrays.sampled_x)
        at = np.arange(count) if has_prompts else arrays.sampled_x.astype(np.int64)
        are_first = has_prompts or count == len(arrays.token_rows)
        with_drafts = captured.sample_next is None and packed.has_drafts
        return QueuedStep(
            path=pb.STEP_PATH_DRAFTS if with_drafts else pb.STEP_PATH_GRAPH,
            sampled_at=at,
            adapters=None,
            outputs=lambda: self._fixed.outputs(slice(count) if are_first else torch.from_numpy(at)),
            sample=captured.replay_sampling,
            sample_next=lambda is_detailed: captured.queue_next_sampling(is_detailed, self._stream),
            answers=self._fixed.answers,
            details=lambda: self._fixed.details,
            states=self._find_states(captured.size, len(arrays.token_rows), num_single),
        )

    def _find_states(self, size: GraphSize, num_tokens: int, num_single: int) -> FollowedStates | None:
        """Return the states of a replayed step. Prompts are after the tokens of all its rows."""
        if self._on.reader is None:
            return None
        at = np.arange(num_tokens)
        at[num_single:] += size.num_rows - num_single
        return FollowedStates(lambda: self._fixed.states[: size.num_tokens].clone(), at)


def _forget(adapter: Adapter) -> None:
    """Do nothing. The queue has held the adapter until now."""
