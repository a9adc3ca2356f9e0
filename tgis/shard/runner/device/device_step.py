"""Work of a step on a device: the forward pass up to the logits, and the sampling.

Steps with drafts are sampled in rounds: the first one samples each row once, and each further round samples
the rows whose last sampled token is the next draft."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from tgis.shard.attention.interface import Attention, StepLayout
from tgis.shard.kernels.cuda.attention import CudaPlan
from tgis.shard.kernels.cuda.grouped.slots import AdapterSlots, SlotTokens
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.step_state import (
    MAX_TOPS,
    DetailQuestions,
    DeviceDetails,
    RowState,
    Segments,
    StagedStep,
    StepTensors,
)
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.memory.state_cache import StateCache, StepStates
from tgis.shard.models.interface import Model, SpeculativeModel, StepInputs, Taps, VirtualTokens
from tgis.shard.runner.device.graphs import StepParts
from tgis.shard.runner.device.step_packer import StagedSize, StepPacker
from tgis.shard.runner.device.stream import DeviceStream
from tgis.shard.runner.device.uploads import Uploads, place_arrays, view_arrays
from tgis.shard.runner.forward import Outputs
from tgis.shard.runner.graph_sizes import MAX_PROMPT_TOKENS, GraphSize

_NONE = torch.empty(0, dtype=torch.int32)
# The service's own models do not read the layout.
NO_LAYOUT = StepLayout(_NONE, _NONE.long(), _NONE, _NONE.view(0, 0))


class StateReader(NamedTuple):
    """States of a model that its speculator reads: the sums of taps, or if there are none the final ones."""

    taps: Taps
    width: int


@dataclass(frozen=True)
class DeviceModel:
    """Model on a device, with the objects that all its steps share."""

    model: Model
    attention: Attention
    kernels: Implementations
    state: RowState
    has_long: bool  # rotary positions of long sequences are scaled differently
    states: StateCache | None = None  # of a model with recurrent layers
    slots: AdapterSlots | None = None  # of adapters, if any may be loaded
    reader: StateReader | None = None  # of a speculator

    def make_inputs(
        self,
        staged: StagedStep,
        tensors: StepTensors,
        size: StagedSize,
        virtual: VirtualTokens | None = None,
        adapters: TokenAdapters | None = None,
    ) -> StepInputs:
        state = self.state
        rows = staged.seq_rows[: size.num_single]
        lens = tensors.seq_lens[: size.num_single]
        cross_lens = tensors.cross_lens[: size.num_single]
        plan = CudaPlan(
            tensors.slot_mapping,
            state.block_tables,
            Segments(rows, lens, tensors.work_starts),
            staged.tiles,
            size.max_seq_len,
        )
        cross = None
        if self.model.spec.is_encoder_decoder:
            segments = Segments(rows, cross_lens, tensors.cross_work_starts)
            cross = CudaPlan(
                tensors.slot_mapping, state.cross_tables, segments, staged.cross_tiles, size.max_cross_len
            )
        is_long = tensors.is_long if self.has_long else None
        states = None if self.states is None else find_states(self.states, staged.spans)
        if self.slots is not None and len(staged.adapter_slots):
            group_rows = self.kernels.group_rows
            adapters = SlotTokens(self.slots, staged.adapter_slots, size.max_rank, group_rows)
        return StepInputs(
            tensors.token_ids, tensors.positions, NO_LAYOUT, plan, cross, is_long, virtual, adapters, states
        )

    def compute(self, staged: StagedStep, tensors: StepTensors, inputs: StepInputs) -> Outputs:
        """Compute the model's outputs like `Forward`, and the states that a speculator reads."""
        if isinstance(inputs.adapters, SlotTokens):  # a replayed step groups its tokens again
            inputs = replace(inputs, adapters=inputs.adapters.take(slice(None)))
        self.kernels.begin_step(staged, self.state, tensors)
        x, states = self._run_layers(inputs)
        num_sampled = len(staged.sampled_x)
        if not num_sampled:
            return Outputs(x, None, states)
        if num_sampled == len(x):
            return Outputs(x, self.model.logits(x, inputs.adapters), states)
        at = staged.sampled_x.long()
        adapters = inputs.adapters
        return Outputs(x, self.model.logits(x[at], adapters and adapters.take(at)), states)

    def _run_layers(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        if self.reader is None:
            return self.model.forward(inputs, self.attention), None
        assert isinstance(self.model, SpeculativeModel), "the speculator was loaded for it"
        x, tapped = self.model.forward_tapped(inputs, self.attention, self.reader.taps)
        return x, self.model.final_states(x, inputs.adapters) if tapped is None else tapped

    def sample(
        self, logits: Tensor, rows: Tensor, answers: Tensor, details: DeviceDetails | None = None
    ) -> None:
        """Sample the next tokens of rows [n] from logits [n, vocab_size], and compute their details."""
        if details is None:
            self.kernels.sample(logits, self.state, rows, answers)
            return
        num_rows, vocab_size = logits.shape
        questions = DetailQuestions.empty(num_rows, vocab_size, logits.device)
        self.kernels.sample(logits, self.state, rows, answers, questions)
        self.kernels.describe(questions, details)


def find_states(cache: StateCache, spans: Tensor) -> StepStates:
    """Return the states of a step's spans, see `StagedStep`."""
    slots, begins, starts = spans
    return StepStates(cache, slots[:-1], begins, starts[:-1])


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
    on: DeviceModel,
    staged: StagedStep,
    logits: Tensor,
    answers: Tensor,
    memory: RoundMemory,
    details: DeviceDetails | None = None,
) -> None:
    """Do a further round. `answers` and `details` have the results of all rounds so far, and receive those of
    this one: no sample has more than one. The logits of samples of later rounds do not change."""
    on.kernels.accept_drafts(staged, on.state, answers, memory.rows)
    on.sample(logits, memory.rows, memory.answers, details)
    answers.add_(memory.answers)


class EagerStep:
    """Step whose kernels are launched one by one, with its own tensors."""

    def __init__(
        self,
        on: DeviceModel,
        staged: StagedStep,
        size: StagedSize,
        virtual: VirtualTokens | None,
        adapters: TokenAdapters | None,
    ):
        device = on.state.words.device
        self._on = on
        self._staged = staged
        self._tensors = StepTensors.empty(size.num_tokens, size.num_seqs, size.num_single, device)
        self._inputs = on.make_inputs(staged, self._tensors, size, virtual, adapters)
        self.adapters = self._inputs.adapters
        self.answers = torch.empty((len(staged.sampled_rows), 2), dtype=torch.int32, device=device)
        self._outputs: Outputs | None = None

    @torch.inference_mode()
    def forward(self) -> None:
        self._outputs = self._on.compute(self._staged, self._tensors, self._inputs)

    def outputs(self) -> Outputs:
        """Return the outputs of `forward`."""
        assert self._outputs is not None
        return self._outputs

    def states(self) -> Tensor:
        """Return the states that a speculator reads, like `outputs`."""
        states = self.outputs().tapped
        assert states is not None, "there is no speculator"
        return states

    @torch.inference_mode()
    def sample(self, is_detailed: bool) -> None:
        logits = self.outputs().logits
        assert logits is not None
        details = self.details if is_detailed else None
        self._on.sample(logits, self._staged.sampled_rows, self.answers, details)

    @cached_property
    def details(self) -> DeviceDetails:
        return DeviceDetails.empty(len(self.answers), MAX_TOPS, self.answers.device)

    @torch.inference_mode()
    def sample_next(self, is_detailed: bool) -> None:
        """Sample the rows whose last sampled token is the next draft."""
        logits = self.outputs().logits
        assert logits is not None, "the step has drafts"
        details = self.details if is_detailed else None
        memory = RoundMemory.allocate(len(self.answers), self.answers.device)
        sample_next(self._on, self._staged, logits, self.answers, memory, details)


class FixedSteps:
    """Fixed memory of captured steps. All sizes read their staged arrays from the same address."""

    def __init__(self, on: DeviceModel, packer: StepPacker, uploads: Uploads, stream: DeviceStream):
        self._on = on
        self._packer = packer
        self._uploads = uploads
        self._max_rows = max_rows = on.state.idle_row
        self._device = stream.device
        largest = GraphSize(max_rows, MAX_PROMPT_TOKENS, has_adapters=on.slots is not None)
        shapes = [array.shape for array in packer.idle_step(largest)]
        _, num_words = place_arrays([prod(shape) for shape in shapes])
        self.staged = torch.zeros(num_words, dtype=torch.int32, device=self._device)
        self.answers = torch.zeros((max_rows, 2), dtype=torch.int32, device=self._device)
        self.details = DeviceDetails.empty(max_rows, MAX_TOPS, self._device)
        self._round = RoundMemory.allocate(max_rows, self._device)
        self._logits: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """Logits of the last replayed step, float32 [max_rows, vocab_size]."""
        if self._logits is None:  # allocated late, because only graphs need them
            shape = self._max_rows, self._on.model.spec.vocab_size
            self._logits = torch.zeros(shape, device=self._device)
        return self._logits

    @cached_property
    def states(self) -> Tensor:
        """States of the last replayed step that a speculator reads, float32 [any, width]."""
        assert self._on.reader is not None, "there is no speculator"
        shape = self._max_rows + MAX_PROMPT_TOKENS, self._on.reader.width
        return torch.zeros(shape, device=self._device)

    def outputs(self, at: slice | Tensor) -> Outputs:
        """Return the outputs of the last replayed step, whose samples have the logits at `at`."""
        return Outputs(self.logits, self.logits[at])

    def make_parts(self, size: GraphSize) -> StepParts:
        """Return the parts of a step of this size, and stage a step of idle rows for them."""
        assert self._on.slots is not None or not size.has_adapters, "there are no slots of adapters"
        arrays = self._packer.idle_step(size)
        self._uploads.send_to(self.staged, arrays)
        staged = StagedStep(*view_arrays(self.staged, [array.shape for array in arrays]))
        tensors = StepTensors.empty(size.num_tokens, size.num_rows, size.num_rows, self._device)
        inputs = self._on.make_inputs(staged, tensors, self._packer.fixed_size(size))
        num_sampled = len(arrays.sampled_x)
        logits = self.logits[:num_sampled]
        answers = self.answers[:num_sampled]
        details = self.details.first(num_sampled)
        memory = self._round.take(num_sampled)

        states = None if self._on.reader is None else self.states[: size.num_tokens]

        def forward() -> None:
            computed = self._on.compute(staged, tensors, inputs)
            assert computed.logits is not None
            logits.copy_(computed.logits)
            if states is not None and computed.tapped is not None:
                states.copy_(computed.tapped)

        def sample() -> None:
            self._on.sample(logits, staged.sampled_rows, answers)

        def sample_detailed() -> None:
            self._on.sample(logits, staged.sampled_rows, answers, details)

        def sample_after() -> None:
            sample_next(self._on, staged, logits, answers, memory)

        def sample_after_detailed() -> None:
            sample_next(self._on, staged, logits, answers, memory, details)

        parts = forward, sample, sample_detailed, sample_after, sample_after_detailed
        return StepParts(*map(torch.inference_mode(), parts))
