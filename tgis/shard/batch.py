"""What a shard keeps of the sequences in generation, and a step's work as packed tensors. All rows are
handled at once, since this is on the path of every token; and all of it can be made again from the router's
messages."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tgis.pb import shard_pb2 as pb
from tgis.shard.attention.base import AttentionMetadata
from tgis.shard.models.interface import StepInputs
from tgis.shard.sampling import PARAMETERS, SamplingBatch, SeenTokens

Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]
TokenIds = npt.NDArray[np.int32]

NOT_WANTED = np.iinfo(np.int64).max
ROW = np.dtype(
    [
        ("open", np.bool_),
        ("ended", np.bool_),
        ("length", np.int64),  # of prompt and generated tokens; the next token's position
        ("prompt_len", np.int64),
        ("limit", np.int64),  # the length at which the row ends
        ("num_blocks", np.int64),
        ("logprobs", np.bool_),
        ("ranks", np.bool_),
        ("top_n", np.int64),
        ("input_from", np.int64),  # first prompt token to report, or NOT_WANTED
    ]
)


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
    """The open rows: at most `max_rows`, of `max_sequence_length` tokens at most, in arrays by row."""

    def __init__(
        self, max_rows: int, max_sequence_length: int, block_size: int, vocab_size: int, device: torch.device
    ):
        self._block_size, self._vocab_size, self._device = block_size, vocab_size, device
        self._rows = np.zeros(max_rows, ROW)
        self._params = np.zeros(max_rows, PARAMETERS)
        self._eos = np.full((max_rows, 1), -1, np.int32)
        # Of these two, only the pages that are written to take memory.
        self._token_ids = np.zeros((max_rows, max_sequence_length), np.int32)
        self._block_tables = np.zeros((max_rows, -(-max_sequence_length // block_size)), np.int32)
        self.seen = SeenTokens(vocab_size, device)

    def reset(self) -> None:
        self._rows["open"] = False

    def close(self, rows: Integers) -> None:
        self._rows["open"][rows] = False

    def open(self, message: pb.OpenRow) -> str | None:
        """The row belongs to this sequence now, whoever had it before. A text says why it cannot be served;
        then it has ended."""
        row, token_ids = message.row, np.frombuffer(message.token_ids, "<i4")
        self._rows[row] = _read_row(message, len(token_ids))
        problem = self._find_problem(message, token_ids)
        if problem is not None:
            self.fail(np.array([row]))
            return problem
        self._token_ids[row, : len(token_ids)] = token_ids
        self._params[row] = _read_parameters(message.sampling)
        self._set_eos(row, np.frombuffer(message.eos_token_ids, "<i4"))
        if message.sampling.repetition_penalty != 1:
            self.seen.start(row, token_ids)
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
        self._append_blocks(rows, _integers(request.num_new_blocks), np.frombuffer(request.new_blocks, "<i4"))
        live = ~self._rows["ended"][rows]
        return self._pack(rows[live], starts[live], ends[live]) if live.any() else None

    def _pack(self, rows: Integers, starts: Integers, ends: Integers) -> Batch:
        state, counts = self._rows[rows], ends - starts
        assert (counts > 0).all(), "empty work"
        assert (ends <= state["length"]).all(), "work on tokens that are not known yet"
        assert (ends <= state["num_blocks"] * self._block_size).all(), "work without blocks to write to"
        cu_seqlens_q = np.concatenate([[0], np.cumsum(counts)])  # [num_seqs + 1]
        sequence = np.repeat(np.arange(len(rows)), counts)  # [num_tokens]
        positions = np.arange(len(sequence)) + (starts - cu_seqlens_q[:-1])[sequence]
        row_of = rows[sequence]
        slots = self._block_tables[row_of, positions // self._block_size].astype(np.int64) * self._block_size
        width = -(-int(ends.max()) // self._block_size)
        metadata = AttentionMetadata(
            cu_seqlens_q=self._tensor(cu_seqlens_q, np.int32),
            seq_lens=self._tensor(ends, np.int32),
            block_tables=self._tensor(self._block_tables[rows, :width], np.int32),
            slot_mapping=self._tensor(slots + positions % self._block_size, np.int64),
        )
        samples = ends == state["length"]
        token_ids = self._token_ids[row_of, positions]
        return Batch(
            inputs=StepInputs(self._tensor(token_ids, np.int64), self._tensor(positions, np.int64), metadata),
            sampled_rows=rows[samples],
            sampled_x=self._tensor(cu_seqlens_q[1:][samples] - 1, np.int64),
            input_spans=list(self._input_spans(rows, starts, ends, cu_seqlens_q)),
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

    def _append_blocks(self, rows: Integers, counts: Integers, blocks: npt.NDArray[np.int32]) -> None:
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

    def _find_problem(self, message: pb.OpenRow, token_ids: TokenIds) -> str | None:
        limit = message.prompt_len + message.max_new_tokens
        max_length = self._token_ids.shape[1]
        if len(token_ids) == 0:
            return "there is no token to begin with"
        if token_ids.min() < 0 or token_ids.max() >= self._vocab_size:
            return f"a token id is not below the model's vocabulary size {self._vocab_size}"
        if max(limit, len(token_ids)) > max_length:
            return f"{limit} tokens are more than the sequence length {max_length}"
        return _find_unsupported(message)

    def _tensor(self, array: npt.NDArray[np.integer], dtype: type[np.integer]) -> Tensor:
        return torch.from_numpy(array.astype(dtype)).to(self._device)


def _integers(column: bytes) -> Integers:
    return np.frombuffer(column, "<i4").astype(np.int64)


def _read_row(message: pb.OpenRow, length: int) -> tuple[bool | int, ...]:
    """As ROW wants it."""
    details = message.details
    limit = message.prompt_len + message.max_new_tokens
    input_from = details.input_from if details.input_tokens else NOT_WANTED
    counts = (length, message.prompt_len, limit, 0)
    return True, length >= limit, *counts, details.logprobs, details.ranks, details.top_n, input_from


def _read_parameters(sampling: pb.Sampling) -> tuple[bool | int | float, ...]:
    """As PARAMETERS wants it; the choice of a greedy row is made of neutral values."""
    choice: tuple[bool | int | float, ...] = (True, 0, 1.0, 0, 1.0, 1.0)
    if not sampling.greedy:
        choice = (
            False,
            sampling.seed,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.typical_p,
        )
    length_penalty = sampling.length_penalty_start, sampling.length_penalty_factor
    return *choice, sampling.repetition_penalty, sampling.min_new_tokens, *length_penalty


def _find_unsupported(message: pb.OpenRow) -> str | None:
    asked = {
        "LoRA adapters": message.adapter_digest,
        "soft prompts": message.prompt_digest,
        "encoder inputs": message.encoder_token_ids,
    }
    return next((f"{name} are not supported by this shard" for name, value in asked.items() if value), None)
