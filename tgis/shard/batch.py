"""What a shard keeps of the sequences in generation, and a step's work as packed tensors. All rows are
handled at once, since this is on the path of every token; and all of it can be made again from the router's
messages."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tgis.pb import shard_pb2 as pb
from tgis.shard.attention.base import AttentionMetadata
from tgis.shard.contents import Contents
from tgis.shard.models.interface import StepInputs
from tgis.shard.opening import (
    ROW,
    Limits,
    find_missing,
    find_problem,
    read_column,
    read_parameters,
    read_row,
)
from tgis.shard.sampling import PARAMETERS, SamplingBatch, SeenTokens
from tgis.shard.tuning import Tuning

Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]
TokenIds = npt.NDArray[np.int32]
Blocks = npt.NDArray[np.int32]


@dataclass(frozen=True)
class InputSpan:
    """Prompt tokens of a row that a step reports, from position `start` on.

    The first of them is described by what the model makes of the token before it, `first_x` in [num_tokens],
    and so on; token 0 has none before it and is described by nothing."""

    row: int
    start: int
    token_ids: TokenIds  # [count]
    first_x: int


@dataclass(frozen=True)
class Batch:
    """The work of one step on num_seqs rows."""

    inputs: StepInputs
    sampled_rows: Integers  # [num_sampled], in the order of work
    sampled_x: Tensor  # int64 [num_sampled], their last tokens in [num_tokens]
    input_spans: list[InputSpan]


@dataclass(frozen=True)
class Wanted:
    """What n rows report of a token: logprobs and ranks bool [n], top_n int64 [n]."""

    logprobs: Booleans
    ranks: Booleans
    top_n: Integers

    @property
    def anything(self) -> Booleans:
        wanted: Booleans = self.logprobs | self.ranks | (self.top_n > 0)
        return wanted

    def take(self, index: Integers) -> "Wanted":
        return Wanted(self.logprobs[index], self.ranks[index], self.top_n[index])


class RowTable:
    """The open rows: at most `max_rows`, of `max_sequence_length` tokens at most, in arrays by row.

    `rope_switch_len` is the length past which a model turns positions differently, or 0. `contents` has the
    soft prompts and adapters that rows may name."""

    def __init__(
        self,
        max_rows: int,
        max_sequence_length: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        contents: Contents,
        *,
        rope_switch_len: int = 0,
        is_encoder_decoder: bool = False,
    ):
        self._block_size, self._device = block_size, device
        self._limits = Limits(
            max_sequence_length, block_size, vocab_size, rope_switch_len, is_encoder_decoder
        )
        self._rows = np.zeros(max_rows, ROW)
        self._params = np.zeros(max_rows, PARAMETERS)
        self._eos = np.full((max_rows, 1), -1, np.int32)
        # Of these three, only the pages that are written to take memory.
        self._token_ids = np.zeros((max_rows, max_sequence_length), np.int32)
        self._block_tables = np.zeros((max_rows, -(-max_sequence_length // block_size)), np.int32)
        self._cross_tables = np.zeros_like(self._block_tables)
        self.seen = SeenTokens(vocab_size, device)
        self._contents, self._tuning = contents, Tuning(max_rows, device)

    def reset(self) -> None:
        self._rows["open"] = False
        self._tuning.reset()

    def close(self, rows: Integers) -> None:
        self._rows["open"][rows] = False
        self._tuning.close(rows.tolist())

    def open(self, message: pb.OpenRow) -> str | None:
        """The row belongs to this sequence now, whoever had it before. A text says why it cannot be served;
        then it has ended."""
        row, token_ids = message.row, read_column(message.token_ids)
        prompt = self._contents.prompt(message.prompt_digest)
        adapter = self._contents.adapter(message.adapter_digest)
        self._rows[row] = read_row(message, self._limits)
        self._tuning.open(row, prompt, adapter)
        problem = find_problem(message, self._limits) or find_missing(message, prompt, adapter)
        if problem is not None:
            self.fail(np.array([row]))
            return problem
        self._token_ids[row, : len(token_ids)] = token_ids
        num_blocks = -(-int(self._rows["encoder_len"][row]) // self._block_size)
        self._cross_tables[row, :num_blocks] = read_column(message.cross_blocks)[:num_blocks]
        self._params[row] = read_parameters(message.sampling)
        self._set_eos(row, read_column(message.eos_token_ids))
        if message.sampling.repetition_penalty != 1:
            self.seen.start(row, token_ids[0 if prompt is None else len(prompt.decoder) :])
        return None

    def fail(self, rows: Integers) -> None:
        self._rows["ended"][rows] = True

    def append(self, rows: Integers, token_ids: TokenIds) -> Booleans:
        """Each of the rows [n] is a token longer; bool [n], where that was its last one."""
        state = self._rows[rows]
        self._token_ids[rows, state["length"]] = token_ids
        self._rows["length"][rows] += 1
        ended: Booleans = state["length"] + 1 >= state["limit"]
        ended |= (self._eos[rows] == token_ids[:, None]).any(-1)
        self._rows["ended"][rows] = ended
        penalised = self._params["repetition_penalty"][rows] != 1
        if penalised.any():
            self.seen.add(rows[penalised], token_ids[penalised])
        return ended

    def wanted(self, rows: Integers) -> Wanted:
        state = self._rows[rows]
        return Wanted(state["logprobs"], state["ranks"], state["top_n"])

    def sampling_batch(self, rows: Integers, described: Booleans, must_end: Booleans) -> SamplingBatch:
        state = self._rows[rows]
        generated = state["length"] - state["prompt_len"]
        params, eos_token_ids = self._params[rows], self._eos[rows]
        return SamplingBatch(rows, params, generated, state["length"], eos_token_ids, described, must_end)

    def pack(self, request: pb.StepRequest) -> Batch | None:
        """The step's work on rows that have not ended, or None where there is none."""
        rows, starts, ends = (_integers(column) for column in (request.rows, request.starts, request.ends))
        assert self._rows["open"][rows].all(), "work on a row that is not open"
        assert len(np.unique(rows)) == len(rows), "a row twice in a step"
        assert not request.num_drafts, "drafts for a shard that cannot check them"
        self._append_blocks(rows, _integers(request.num_new_blocks), read_column(request.new_blocks))
        live = ~self._rows["ended"][rows]
        return self._pack(rows[live], starts[live], ends[live]) if live.any() else None

    def _pack(self, rows: Integers, starts: Integers, ends: Integers) -> Batch:
        state, counts = self._rows[rows], ends - starts
        assert (counts > 0).all(), "empty work"
        assert (ends <= state["length"]).all(), "work on tokens that are not known yet"
        assert (ends <= state["num_blocks"] * self._block_size).all(), "work without blocks to write to"
        layout, samples = _Layout.of(starts, ends), ends == state["length"]
        metadata = self._metadata(self._block_tables, rows, ends, layout)
        is_long = state["is_long"][layout.sequence] if state["is_long"].any() else None  # [num_tokens]
        return Batch(
            inputs=StepInputs(
                self._tensor(self._token_ids[rows[layout.sequence], layout.positions], np.int64),
                self._tensor(layout.positions, np.int64),
                metadata,
                self._cross(rows, metadata) if self._limits.is_encoder_decoder else None,
                None if is_long is None else self._tensor(is_long, np.bool_),
                self._tuning.place("decoder", rows, starts, layout.begins),
                self._tuning.adapters(rows, layout.sequence),
            ),
            sampled_rows=rows[samples],
            sampled_x=self._tensor(layout.begins[1:][samples] - 1, np.int64),
            input_spans=list(self._input_spans(rows, starts, ends, layout.begins)),
        )

    def pack_encoder(self, opened: Iterable[pb.OpenRow]) -> StepInputs | None:
        """What the encoder must compute for rows just opened, or None where that is nothing."""
        ended = self._rows["ended"]
        fresh = [message for message in opened if not message.is_encoded and not ended[message.row]]
        ids = [read_column(message.encoder_token_ids) for message in fresh]
        if not any(map(len, ids)):
            return None
        rows, lengths = np.array([message.row for message in fresh]), np.array([len(x) for x in ids])
        layout = _Layout.of(np.zeros_like(lengths), lengths)
        token_ids, positions = (self._tensor(x, np.int64) for x in (np.concatenate(ids), layout.positions))
        return StepInputs(
            token_ids,
            positions,
            self._metadata(self._cross_tables, rows, lengths, layout),
            virtual=self._tuning.place("encoder", rows, np.zeros_like(lengths), layout.begins),
            adapters=self._tuning.adapters(rows, layout.sequence),
        )

    def _metadata(
        self, tables: Blocks, rows: Integers, ends: Integers, layout: "_Layout"
    ) -> AttentionMetadata:
        size, width = self._block_size, -(-int(ends.max()) // self._block_size)
        blocks = tables[rows[layout.sequence], layout.positions // size].astype(np.int64)  # [num_tokens]
        return AttentionMetadata(
            cu_seqlens_q=self._tensor(layout.begins, np.int32),
            seq_lens=self._tensor(ends, np.int32),
            block_tables=self._tensor(tables[rows, :width], np.int32),
            slot_mapping=self._tensor(blocks * size + layout.positions % size, np.int64),
        )

    def _cross(self, rows: Integers, metadata: AttentionMetadata) -> AttentionMetadata:
        """How the tokens of `metadata` see what the encoder made of their rows' inputs."""
        lengths = self._rows["encoder_len"][rows]  # [num_seqs]
        width = -(-int(lengths.max()) // self._block_size)
        return AttentionMetadata(
            cu_seqlens_q=metadata.cu_seqlens_q,
            seq_lens=self._tensor(lengths, np.int32),
            block_tables=self._tensor(self._cross_tables[rows, :width], np.int32),
            slot_mapping=torch.empty(0, dtype=torch.int64, device=self._device),
            is_cross=True,
        )

    def _input_spans(
        self, rows: Integers, starts: Integers, ends: Integers, cu_seqlens_q: Integers
    ) -> Iterator[InputSpan]:
        """Computing [start, end) tells of the tokens start + 1 to end; of token 0 there is nothing to
        tell."""
        state = self._rows[rows]
        for i in ((state["input_from"] <= ends) & (starts < state["prompt_len"])).nonzero()[0].tolist():
            first = 0 if starts[i] == 0 else int(starts[i]) + 1
            first = max(first, int(state["input_from"][i]))
            end = min(int(ends[i]) + 1, int(state["prompt_len"][i]))
            if first < end:
                first_x = int(cu_seqlens_q[i] - starts[i]) + max(first, 1) - 1
                yield InputSpan(int(rows[i]), first, self._token_ids[rows[i], first:end], first_x)

    def _append_blocks(self, rows: Integers, counts: Integers, blocks: Blocks) -> None:
        targets = np.repeat(rows, counts)  # [num_blocks]
        places = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._block_tables[targets, self._rows["num_blocks"][targets] + places] = blocks
        self._rows["num_blocks"][rows] += counts

    def _set_eos(self, row: int, token_ids: TokenIds) -> None:
        missing = len(token_ids) - self._eos.shape[1]
        if missing > 0:
            self._eos = np.pad(self._eos, ((0, 0), (0, missing)), constant_values=-1)
        self._eos[row] = -1
        self._eos[row, : len(token_ids)] = token_ids

    def _tensor(
        self, array: npt.NDArray[np.integer | np.bool_], dtype: type[np.integer | np.bool_]
    ) -> Tensor:
        return torch.from_numpy(array.astype(dtype)).to(self._device)


def _integers(column: bytes) -> Integers:
    return read_column(column).astype(np.int64)


class _Layout(NamedTuple):
    """Positions of sequences, packed along one axis."""

    begins: Integers  # [num_seqs + 1], where each sequence's begin
    sequence: Integers  # [num_tokens]
    positions: Integers  # [num_tokens]

    @classmethod
    def of(cls, starts: Integers, ends: Integers) -> "_Layout":
        counts = ends - starts
        begins = np.concatenate([[0], np.cumsum(counts)])
        sequence = np.repeat(np.arange(len(counts)), counts)
        return cls(begins, sequence, np.arange(len(sequence)) + (starts - begins[:-1])[sequence])
