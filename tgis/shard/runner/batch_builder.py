"""Packs a step's work into tensors. The code is vectorized over rows, because it runs for every token."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tgis.pb import shard_pb2 as pb
from tgis.shard.attention.interface import Attention, AttentionPlan, StepLayout
from tgis.shard.memory.placing import move
from tgis.shard.memory.state_cache import DraftedStates, StateCache, StepStates
from tgis.shard.models.interface import StepInputs
from tgis.shard.runner.columns import NOT_WANTED, read_column
from tgis.shard.runner.proposer import DraftProposer, merge_proposed
from tgis.shard.runner.row_table import Blocks, Booleans, Integers, Layout, RowTable, TokenIds
from tgis.shard.sampling.logprobs import InputSpan

Array = npt.NDArray[np.generic]


class Work(NamedTuple):
    """Work of a step on rows that have not ended."""

    rows: Integers  # [num_seqs]
    starts: Integers  # [num_seqs]
    ends: Integers  # [num_seqs], including drafts
    layout: Layout
    sampled_rows: Integers  # [num_sampled], in the order of work; each row once, plus once for each draft
    sampled_x: Integers  # [num_sampled], index in [num_tokens] of the token before each sample
    input_spans: list[InputSpan]
    drafts: TokenIds | None = None  # [num_sampled], drafted token ids, -1 where there is no draft
    num_proposed: Mapping[int, int] = {}  # number of drafts that the shard proposed, by row

    def count_drafts(self) -> Integers:
        """Return the number of drafts of its row before each sample, [num_sampled]."""
        at = np.arange(len(self.sampled_rows))
        is_first = np.diff(self.sampled_rows, prepend=-1) != 0
        return at - np.maximum.accumulate(np.where(is_first, at, 0))


@dataclass(frozen=True)
class Batch:
    """Work packed into tensors."""

    work: Work
    inputs: StepInputs
    sampled_x: Tensor  # int64 [num_sampled]

    @property
    def sampled_rows(self) -> Integers:
        return self.work.sampled_rows

    @property
    def input_spans(self) -> list[InputSpan]:
        return self.work.input_spans


class BatchBuilder:
    """Builder of batches from the rows of a table."""

    def __init__(
        self,
        table: RowTable,
        attention: Attention,
        proposer: DraftProposer | None = None,
        singles_first: bool = False,
        states: StateCache | None = None,
    ):
        """Create a builder that plans steps with `attention`. `proposer` proposes drafts for the rows for
        which the router requests drafts of the shard. With `singles_first`, sequences with a single new token
        come first in a step, and a token and each of its drafts are sequences of their own. `states` are
        those of a model with recurrent layers."""
        self.table = table
        self._block_size = table.block_size
        self._attention = attention
        self._proposer = proposer
        self._singles_first = singles_first
        self.states = states

    def pack(self, request: pb.StepRequest) -> Batch | None:
        """Pack the step's work on rows that have not ended. Return None if there is none."""
        work = self.find_work(request)
        return None if work is None else self.pack_work(work)

    def find_last(self, rows: Integers) -> Work:
        """Return the work on the last token of each row."""
        lengths = self.table.lengths[rows]
        return self._plain_work(rows, lengths - 1, lengths)

    def find_work(self, request: pb.StepRequest) -> Work | None:
        """Return the step's work on rows that have not ended, or None if there is none."""
        rows, starts, ends = (_integers(column) for column in (request.rows, request.starts, request.ends))
        assert self.table.is_open[rows].all(), "work on a row that is not open"
        assert len(set(rows.tolist())) == len(rows), "a row twice in a step"
        if request.new_blocks:
            self.table.append_blocks(rows, _integers(request.num_new_blocks), read_column(request.new_blocks))
        num_drafts = _integers(request.num_drafts)
        ids = read_column(request.draft_ids)
        max_drafts = _integers(request.max_drafts)
        ended = self.table.ended[rows]
        if ended.any():
            live = ~ended
            rows, starts, ends = rows[live], starts[live], ends[live]
            if len(ids):
                num_drafts, ids = num_drafts[live], ids[live.repeat(num_drafts)]
            if len(max_drafts):
                max_drafts = max_drafts[live]
        if not len(rows):
            return None
        if len(max_drafts):
            return self._proposed_work(rows, starts, ends, num_drafts, ids, max_drafts)
        if len(ids):
            return self._draft_work(rows, starts, ends, num_drafts, ids)
        return self._plain_work(rows, starts, ends)

    def pack_work(self, work: Work) -> Batch:
        inputs = self._inputs(work.rows, work.starts, work.ends, work.layout)
        return Batch(work, inputs, self._tensor(work.sampled_x, np.int64))

    def _plain_work(self, rows: Integers, starts: Integers, ends: Integers) -> Work:
        order = self._find_order(ends - starts)
        if order is not None:
            rows, starts, ends = rows[order], starts[order], ends[order]
        layout = Layout.of(starts, ends)
        samples = self._check(rows, starts, ends)
        all_sample = bool(samples.all())
        lasts = layout.begins[1:] - 1
        spans = self._input_spans(rows, starts, ends, layout.begins)
        sampled = (rows, lasts) if all_sample else (rows[samples], lasts[samples])
        return Work(rows, starts, ends, layout, *sampled, spans)

    def _draft_work(
        self, rows: Integers, starts: Integers, ends: Integers, num_drafts: Integers, ids: TokenIds
    ) -> Work:
        """Return work that treats drafts as the rows' next tokens. Sampled tokens later overwrite wrong
        drafts."""
        order = self._find_order(ends - starts)
        if order is not None:
            parts = np.split(ids, num_drafts.cumsum()[:-1])
            ids = np.concatenate([parts[i] for i in order.tolist()])
            rows, starts, ends, num_drafts = rows[order], starts[order], ends[order], num_drafts[order]
        samples = self._check(rows, starts, ends)
        has_drafts = num_drafts > 0
        assert (samples & (starts == ends - 1))[has_drafts].all(), "drafts with more than the last token"
        assert (ends + num_drafts < self.table.limit[rows])[has_drafts].all(), "drafts past the limit"
        drafted = Layout.of(ends, ends + num_drafts)
        self.table.token_ids[rows[drafted.sequence], drafted.positions] = ids
        layout = Layout.of(starts, ends + num_drafts)
        lasts = layout.begins[1:]
        sampled = Layout.of(lasts - num_drafts - samples, lasts)
        drafts = np.full(len(sampled.positions), -1, np.int32)
        drafts[np.delete(np.arange(len(drafts)), sampled.begins[1:][samples] - 1)] = ids
        spans = self._input_spans(rows, starts, ends, layout.begins)
        work = Work(
            rows, starts, ends + num_drafts, layout, rows[sampled.sequence], sampled.positions, spans, drafts
        )
        if not self._singles_first:
            return work
        assert self.states is None, "drafts of a model that keeps a state"
        return _split_drafts(work, num_drafts)

    def _proposed_work(
        self,
        rows: Integers,
        starts: Integers,
        ends: Integers,
        num_drafts: Integers,
        ids: TokenIds,
        max_drafts: Integers,
    ) -> Work:
        """Return work on drafts from the shard's proposer and from the router."""
        assert self._proposer is not None, "the router requested drafts of a shard without a proposer"
        if self.states is not None:
            max_drafts = self.states.limit_drafts(max_drafts)
        at = max_drafts.nonzero()[0]
        lengths = zip(rows[at].tolist(), self.table.lengths[rows[at]].tolist(), strict=True)
        token_ids = [self.table.token_ids[row, :length] for row, length in lengths]
        proposed = self._proposer.propose(rows[at], token_ids, max_drafts[at])
        counts = num_drafts if len(num_drafts) else np.zeros_like(rows)
        counts, ids = merge_proposed(counts, ids, at, proposed)
        assert (counts[at] <= max_drafts[at]).all(), "more drafts than allowed"
        if not len(ids):
            return self._plain_work(rows, starts, ends)
        num_proposed = dict(zip(rows[at].tolist(), counts[at].tolist(), strict=True))
        return self._draft_work(rows, starts, ends, counts, ids)._replace(num_proposed=num_proposed)

    def _find_order(self, counts: Integers) -> Integers | None:
        """Return the order of sequences with these numbers of new tokens, or None if they are in order."""
        is_single = counts == 1
        if not self._singles_first or not (is_single[1:] & ~is_single[:-1]).any():
            return None
        return np.argsort(~is_single, kind="stable")

    def _check(self, rows: Integers, starts: Integers, ends: Integers) -> Booleans:
        """Check the work. Return bool [num_seqs], True where it reaches the row's last token."""
        lengths = self.table.lengths[rows]
        assert (ends > starts).all(), "empty work"
        assert (ends <= lengths).all(), "work on unknown tokens"
        samples: Booleans = ends == lengths
        return samples

    def _inputs(self, rows: Integers, starts: Integers, ends: Integers, layout: Layout) -> StepInputs:
        """Pack the model's inputs for the tokens up to `ends`, including drafts."""
        assert (ends <= self.table.num_blocks[rows] * self._block_size).all(), "work without cache blocks"
        row = rows[layout.sequence]  # [num_tokens]
        step_layout = self._step_layout(self.table.block_tables, rows, ends, layout)
        return StepInputs(
            self._tensor(self.table.token_ids[row, layout.positions], np.int64),
            move(step_layout.positions, self.table.device),
            step_layout,
            self._attention.plan(step_layout, "self"),
            self._plan_cross(rows, step_layout) if self.table.limits.is_encoder_decoder else None,
            self._find_long(row) if self.table.limits.rope_switch_len else None,
            self.table.row_adapters.virtual_tokens("decoder", rows, starts, layout.begins),
            self.table.row_adapters.token_adapters(rows, layout.sequence),
            None if self.states is None else self._step_states(self.states, rows, starts, ends, layout),
        )

    def _step_states(
        self, states: StateCache, rows: Integers, starts: Integers, ends: Integers, layout: Layout
    ) -> StepStates:
        slots = self.table.rows["state_slot"][rows]
        places = states.places[slots]
        begins = layout.begins
        if not len(states.spares):
            first = self._tensor(starts, np.int64) if states.shape.chunk else None
            return StepStates(states, self._tensor(places, np.int64), self._tensor(begins, np.int64), first)
        targets = places[layout.sequence]
        drafted = None
        some = (ends > self.table.lengths[rows]).nonzero()[0]
        if len(some):
            at = np.isin(layout.sequence, some).nonzero()[0]
            targets[at] = states.spares[: len(at)]
            counts = (ends - starts)[some]
            drafted = DraftedStates(rows[some], slots[some], starts[some], counts.cumsum() - counts)
            # A captured step has as many sequences as tokens. The others are empty.
            num_empty = len(targets) - len(rows)
            places = np.pad(places, (0, num_empty))
            begins = np.pad(begins, (0, num_empty), "edge")
        tensors = [self._tensor(each, np.int64) for each in (places, begins, targets)]
        return StepStates(states, tensors[0], tensors[1], None, tensors[2], drafted)

    def _find_long(self, row: Integers) -> Tensor | None:
        is_long = self.table.rows["opened_len"][row] > self.table.limits.rope_switch_len  # [num_tokens]
        return self._tensor(is_long, np.bool_) if is_long.any() else None

    def pack_encoder(self, opened: Iterable[pb.OpenRow]) -> StepInputs | None:
        """Pack the encoder's work for newly opened rows. Return None if there is none."""
        ended = self.table.rows["ended"]
        unencoded = [message for message in opened if not message.is_encoded and not ended[message.row]]
        ids = [read_column(message.encoder_token_ids) for message in unencoded]
        if not any(map(len, ids)):
            return None
        rows = np.array([message.row for message in unencoded])
        lengths = np.array([len(x) for x in ids])
        layout = Layout.of(np.zeros_like(lengths), lengths)
        step_layout = self._step_layout(self.table.cross_tables, rows, lengths, layout)
        return StepInputs(
            self._tensor(np.concatenate(ids), np.int64),
            move(step_layout.positions, self.table.device),
            step_layout,
            self._attention.plan(step_layout, "encoder"),
            virtual=self.table.row_adapters.virtual_tokens(
                "encoder", rows, np.zeros_like(lengths), layout.begins
            ),
            adapters=self.table.row_adapters.token_adapters(rows, layout.sequence),
        )

    def _step_layout(self, tables: Blocks, rows: Integers, ends: Integers, layout: Layout) -> StepLayout:
        width = -(-int(ends.max()) // self._block_size)
        return StepLayout(
            cu_seqlens_q=_host_tensor(layout.begins, np.int32),
            positions=_host_tensor(layout.positions, np.int64),
            seq_lens=_host_tensor(ends, np.int32),
            block_tables=_host_tensor(tables[rows, :width], np.int32),
        )

    def _plan_cross(self, rows: Integers, step_layout: StepLayout) -> AttentionPlan:
        lengths = self.table.rows["encoder_len"][rows]  # [num_seqs]
        width = -(-int(lengths.max()) // self._block_size)
        encoded = replace(
            step_layout,
            seq_lens=_host_tensor(lengths, np.int32),
            block_tables=_host_tensor(self.table.cross_tables[rows, :width], np.int32),
        )
        return self._attention.plan(encoded, "cross")

    def _input_spans(
        self, rows: Integers, starts: Integers, ends: Integers, cu_seqlens_q: Integers
    ) -> list[InputSpan]:
        # Computing [start, end) yields the logits for tokens start + 1 to end. Token 0 has no logits.
        input_from = self.table.input_from[rows]
        spans: list[InputSpan] = []
        if (input_from == NOT_WANTED).all():
            return spans
        prompt_len = self.table.rows["prompt_len"][rows]
        for i in ((input_from <= ends) & (starts < prompt_len)).nonzero()[0].tolist():
            first = 0 if starts[i] == 0 else int(starts[i]) + 1
            first = max(first, int(input_from[i]))
            end = min(int(ends[i]) + 1, int(prompt_len[i]))
            if first < end:
                first_x = int(cu_seqlens_q[i] - starts[i]) + max(first, 1) - 1
                spans.append(
                    InputSpan(int(rows[i]), first, self.table.token_ids[rows[i], first:end], first_x)
                )
        return spans

    def _tensor(self, array: Array, dtype: type[np.generic]) -> Tensor:
        return move(_host_tensor(array, dtype), self.table.device)


def _split_drafts(work: Work, num_drafts: Integers) -> Work:
    """Make a sequence of each token of the sequences with drafts. Its keys and values up to its own token are
    those that it would have without later drafts."""
    num_parts = np.where(num_drafts > 0, num_drafts + 1, 1)
    part = np.arange(num_parts.sum()) - (num_parts.cumsum() - num_parts).repeat(num_parts)
    has_drafts = num_drafts.repeat(num_parts) > 0
    starts, ends = work.starts.repeat(num_parts), work.ends.repeat(num_parts)
    starts = np.where(has_drafts, starts + part, starts)
    ends = np.where(has_drafts, starts + 1, ends)
    rows = work.rows.repeat(num_parts)
    return work._replace(rows=rows, starts=starts, ends=ends, layout=Layout.of(starts, ends))


def _host_tensor(array: Array, dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(array.astype(dtype))


def _integers(column: bytes) -> Integers:
    return read_column(column).astype(np.int64)
