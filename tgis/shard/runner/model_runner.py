"""Model runner with rows and sampling on the CPU. It computes one step at a time."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tgis import failpoints
from tgis.pb import shard_pb2 as pb
from tgis.shard.adapters.registry import LoadedAdapters
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.memory.state_cache import StateCache, StepStates
from tgis.shard.models.interface import EncodingModel, SpeculativeModel
from tgis.shard.runner.batch_builder import Batch, BatchBuilder
from tgis.shard.runner.columns import read_column
from tgis.shard.runner.forward import Forward, Outputs
from tgis.shard.runner.host_sampler import HostSampler
from tgis.shard.runner.proposer import FollowingProposer, TakeStates
from tgis.shard.runner.proposers.followed_work import follow_work, split_followed
from tgis.shard.runner.row_table import Integers, RowTable
from tgis.shard.runner.step_response import Problem, report_problem
from tgis.shard.sampling.grammar import Guides

NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class ComputedStep:
    """`Pending` step that is already computed."""

    response: pb.StepResponse

    def answer(self) -> pb.StepResponse:
        return self.response


class HostModelRunner:
    """`ModelRunner` that computes a step when it is launched."""

    max_pending = 1

    def __init__(
        self,
        forward: Forward,
        builder: BatchBuilder,
        guides: Guides,
        info: pb.InfoResponse,
        adapters: LoadedAdapters,
        speculator: FollowingProposer | None = None,
    ) -> None:
        """Create a runner. `speculator` is the proposer of the builder, if that one follows steps."""
        self.info = info
        self.adapters = adapters
        self.model = forward.model
        self.forward = forward
        self._builder = builder
        self._table = builder.table
        self._guides = guides
        self._speculator = speculator
        self._recomputed = NO_ROWS  # rows of the present step that were computed again without drafts
        self._is_answering = info.rank == 0
        self._sampler = HostSampler(self.model, self._compute, self._table, guides, self._is_answering)

    def reset(self) -> None:
        """Forget all rows."""
        self._table.reset()
        self._guides.reset()
        if self._speculator is not None:
            self._speculator.reset()

    def launch(self, request: pb.StepRequest) -> ComputedStep:
        began = time.perf_counter_ns()
        response = pb.StepResponse(step_id=request.step_id)
        for problem in close_and_open(request, self._table, self._guides):
            report_problem(response, problem, self._is_answering)
        if self._speculator is not None and request.opened_rows:
            self._speculator.open_rows(np.array([message.row for message in request.opened_rows]))
        if (states := self._builder.states) is not None:
            open_states(request, states)
        failpoints.hit("shard.before_forward", lambda: self._table.label_rows(request))
        encoder_inputs = self._builder.pack_encoder(request.opened_rows)
        batch = self._builder.pack(request)
        self._recomputed = NO_ROWS
        with torch.inference_mode():
            if encoder_inputs is not None:
                assert isinstance(self.model, EncodingModel), "encoder inputs for a model without an encoder"
                self.model.encode(encoder_inputs, self.forward.attention)
            if batch is not None:
                self._compute_batch(batch, request, response)
        if states is not None:
            sources = {} if batch is None else self._keep_states(batch.inputs.states)
            states.copy_all(list_saves(request, self._table), sources)
        response.forward_ns = time.perf_counter_ns() - began
        return ComputedStep(response)

    def _keep_states(self, states: StepStates | None) -> dict[int, int]:
        """Keep the states after the accepted drafts of a step. Return the places in memory of the states
        before the drafts, by slot."""
        if states is None or states.drafted is None:
            return {}
        is_kept = ~np.isin(states.drafted.rows, self._recomputed)
        rows, slots, starts, spares = (each[is_kept] for each in states.drafted)
        cache = states.cache
        firsts = dict(zip(slots.tolist(), cache.spares[spares].tolist(), strict=True))
        # The newest token has no state yet. Rows for which no token was sampled have ended.
        num_accepted = np.maximum(self._table.lengths[rows] - starts - 2, 0)
        cache.accept(slots, spares + num_accepted)
        return firsts

    def _compute_batch(self, batch: Batch, request: pb.StepRequest, response: pb.StepResponse) -> None:
        work = batch.work
        adapters = batch.inputs.adapters
        if self._speculator is None:
            self._sampler.answer(work, adapters, self.forward(batch, is_tapped=False), response)
            return
        followed, others = split_followed(request, work)
        follows = len(followed.rows) > 0
        outputs = self.forward(batch, is_tapped=follows)
        states = outputs.x if outputs.tapped is None else outputs.tapped
        if follows and work.drafts is not None:
            states = states.clone()  # rows that are computed again without drafts overwrite it
        self._sampler.answer(work, adapters, outputs, response)
        began = time.perf_counter_ns()
        take = self._read_states(states, adapters, is_final=outputs.tapped is None)
        follow_work(self._speculator, followed, others, take)
        response.follow_ns = time.perf_counter_ns() - began

    def _read_states(self, x: Tensor, adapters: TokenAdapters | None, is_final: bool) -> TakeStates:
        """Return the function that returns states of a step for which the model's output, or the sum of its
        taps, is x."""

        def take(at: Integers) -> Tensor:
            index = torch.from_numpy(at)
            if not is_final:
                return x[index]
            assert isinstance(self.model, SpeculativeModel), "the speculator was loaded for it"
            return self.model.final_states(x[index], adapters and adapters.take(index))

        return take

    def _compute(self, rows: Integers) -> Outputs:
        self._recomputed = rows
        return self.forward(self._builder.pack_work(self._builder.find_last(rows)), is_tapped=False)


def open_states(request: pb.StepRequest, states: StateCache) -> None:
    """Set the states of the opened rows, in the order of the message: a later row's slot may be an earlier
    one's source."""
    for message in request.opened_rows:
        if message.state_source == -1:
            states.clear(message.state_slot)
        elif message.state_source != message.state_slot:
            states.copy(message.state_source, message.state_slot)


def list_saves(request: pb.StepRequest, table: RowTable) -> list[tuple[int, int]]:
    """Return the slots of the states that are copied after the step's work, and the slots of the copies."""
    saves = zip(read_column(request.rows), read_column(request.state_saves), strict=False)
    return [(int(table.rows["state_slot"][row]), int(slot)) for row, slot in saves if slot != -1]


def close_and_open(request: pb.StepRequest, table: RowTable, guides: Guides) -> Iterator[Problem]:
    """Close and open rows as the step requests. Yield the problems of rows that cannot be served."""
    closed = read_column(request.closed_rows).astype(np.int64)
    table.close(closed)
    guides.close(closed)
    for message in request.opened_rows:
        problem = table.open(message)
        if problem is None:
            guides.open(message)
        else:
            yield Problem(message.row, problem)
