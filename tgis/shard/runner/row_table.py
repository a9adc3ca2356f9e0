"""State of a shard's sequences, in arrays indexed by row. The router can rebuild it with its messages."""

import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tgis.pb import shard_pb2 as pb
from tgis.shard.adapters.registry import LoadedAdapters, LoadedPrompt
from tgis.shard.adapters.row_adapters import RowAdapters
from tgis.shard.layers.lora import Adapter
from tgis.shard.runner.columns import RAGGED_COLUMNS, ROW, RaggedValues, read_column, read_row
from tgis.shard.sampling.sampler import ROW_PARAMETERS, LogitBias, Modifiers, SamplingBatch, SeenTokens

Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]
TokenIds = npt.NDArray[np.int32]
Blocks = npt.NDArray[np.int32]

# Number of row sets whose traits are cached. Consecutive steps mostly have the same rows.
MAX_CACHED = 16


@dataclass(frozen=True)
class RowLimits:
    """Limits of rows, and the model properties that determine how rows are computed."""

    max_sequence_length: int  # limit of the decoder's tokens, and of the encoder's
    block_size: int
    vocab_size: int
    rope_switch_len: int = 0  # length past which rotary positions are scaled differently; 0: never
    is_encoder_decoder: bool = False


@dataclass(frozen=True)
class Traits:
    """Properties of n rows that do not change between steps."""

    params: npt.NDArray[np.void]  # ROW_PARAMETERS [n]
    eos_token_ids: TokenIds  # [n, any], padded with -1
    prompt_len: Integers  # [n]
    wanted: npt.NDArray[np.void]  # [n], requested token details: logprobs, ranks and top_n
    wants_details: Booleans  # [n], True where token details are requested
    raw_details: Integers  # sorted indices in [n] of rows whose details are computed from unmodified logits
    bias: LogitBias | None  # None if no row has biases
    is_plain: bool  # True if all rows are greedy and no parameter changes their logits
    modifiers: Modifiers


class Layout(NamedTuple):
    """Packed positions of several sequences, one sequence after another."""

    begins: Integers  # [num_seqs + 1], index of each sequence's first position, followed by the total
    sequence: Integers  # [num_tokens]
    positions: Integers  # [num_tokens]

    @classmethod
    def of(cls, starts: Integers, ends: Integers) -> "Layout":
        """Lay out the positions [start, end) of each sequence."""
        counts = ends - starts
        if (counts == 1).all():
            numbers = np.arange(len(counts) + 1)
            return cls(numbers, numbers[:-1], starts)
        begins = np.concatenate([[0], np.cumsum(counts)])
        sequence = np.repeat(np.arange(len(counts)), counts)
        return cls(begins, sequence, np.arange(len(sequence)) + (starts - begins[:-1])[sequence])


class RowTable:
    """Table of open rows. `adapters` holds the soft prompts and adapters that rows can use."""

    def __init__(self, max_rows: int, limits: RowLimits, device: torch.device, adapters: LoadedAdapters):
        self.limits = limits
        self.block_size = limits.block_size
        self.device = device
        self.rows = rows = np.zeros(max_rows, ROW)
        self.is_open = rows["open"]
        self.ended = rows["ended"]
        self.lengths = rows["length"]
        self.limit = rows["limit"]
        self.num_blocks = rows["num_blocks"]
        self.input_from = rows["input_from"]
        self.ragged = {column.name: RaggedValues(column, max_rows) for column in RAGGED_COLUMNS}
        # The system allocates the next three arrays lazily: only written pages use memory.
        self.token_ids = np.zeros((max_rows, limits.max_sequence_length), np.int32)
        width = -(-limits.max_sequence_length // limits.block_size)
        self.block_tables = np.zeros((max_rows, width), np.int32)
        self.cross_tables = np.zeros_like(self.block_tables)
        self.seen = SeenTokens(limits.vocab_size, device)
        self._adapters = adapters
        self.row_adapters = RowAdapters(max_rows, device)
        self._traits: dict[bytes, Traits] = {}

    def share_rows(self) -> "RowTable":
        """Return a table of the same rows for another model, which knows no soft prompts and adapters, and
        whose rotary positions are always scaled as in short rows."""
        table = copy.copy(self)
        table.limits = replace(self.limits, rope_switch_len=0)
        table.row_adapters = RowAdapters(len(self.rows), self.device)
        return table

    def reset(self) -> None:
        self.is_open[:] = False
        self._traits.clear()
        self.row_adapters.reset()

    def close(self, rows: Integers) -> None:
        if len(rows):
            self.is_open[rows] = False
            self._traits.clear()
            self.row_adapters.close(rows.tolist())

    def open(self, message: pb.OpenRow) -> str | None:
        """Replace the row's sequence. If it cannot be served, end the row and return the reason, else
        None."""
        row = message.row
        token_ids = read_column(message.token_ids)
        prompt = self._adapters.prompt(message.prompt_digest)
        adapter = self._adapters.adapter(message.adapter_digest)
        self._traits.clear()
        self.rows[row] = read_row(message)
        for values in self.ragged.values():
            values.open(row, message)
        self.row_adapters.open(row, prompt, adapter)
        problem = find_problem(message, self.limits) or _find_missing(message, prompt, adapter)
        if problem is not None:
            self.fail(np.array([row]))
            return problem
        self.token_ids[row, : len(token_ids)] = token_ids
        num_blocks = -(-int(self.rows["encoder_len"][row]) // self.block_size)
        self.cross_tables[row, :num_blocks] = read_column(message.cross_blocks)[:num_blocks]
        if message.sampling.repetition_penalty != 1:
            self.seen.start(row, token_ids[0 if prompt is None else len(prompt.decoder) :])
        return None

    def append_blocks(self, rows: Integers, counts: Integers, blocks: Blocks) -> None:
        before = self.num_blocks[rows]
        added = Layout.of(before, before + counts)
        self.block_tables[rows[added.sequence], added.positions] = blocks
        self.num_blocks[rows] += counts

    def fail(self, rows: Integers) -> None:
        self.ended[rows] = True

    def append(self, rows: Integers, token_ids: TokenIds) -> Booleans:
        """Append a token to each of the rows [n]. Return bool [n], True where it ends the row."""
        traits = self.traits(rows)
        lengths = self.lengths[rows]
        self.token_ids[rows, lengths] = token_ids
        lengths += 1
        self.lengths[rows] = lengths
        ended: Booleans = (traits.eos_token_ids == token_ids[:, None]).any(-1)
        ended |= lengths >= self.limit[rows]
        self.ended[rows] = ended
        if traits.modifiers.repetition_penalty:
            penalised = traits.params["repetition_penalty"] != 1
            self.seen.add(rows[penalised], token_ids[penalised])
        return ended

    def label_rows(self, request: pb.StepRequest) -> list[str]:
        """Label the step's rows for failpoints."""
        lengths = self.rows["prompt_len"][read_column(request.rows)]
        return [f"prompt={length}" for length in lengths.tolist()]

    def traits(self, rows: Integers) -> Traits:
        key = rows.tobytes()
        traits = self._traits.get(key)
        if traits is None:
            if len(self._traits) >= MAX_CACHED:
                self._traits.clear()
            traits = self._traits[key] = self._find_traits(rows)
        return traits

    def sampling_batch(
        self, rows: Integers, wants_details: Booleans, must_end: Booleans | np.bool_
    ) -> SamplingBatch:
        traits = self.traits(rows)
        lengths = self.lengths[rows]
        return SamplingBatch(
            rows,
            traits.params,
            lengths - traits.prompt_len,
            lengths,
            self.token_ids,
            traits.eos_token_ids,
            wants_details,
            must_end,
            traits.bias,
            traits.is_plain,
            traits.modifiers,
        )

    def _find_traits(self, rows: Integers) -> Traits:
        state = self.rows[rows]
        wanted = state[["logprobs", "ranks", "top_n"]]
        wants_details = wanted["logprobs"] | wanted["ranks"] | (wanted["top_n"] > 0)
        lists = {name: values.take(rows) for name, values in self.ragged.items()}
        params = state[list(ROW_PARAMETERS.names or ())]
        return Traits(
            params,
            lists["eos_token_ids"],
            state["prompt_len"],
            wanted,
            wants_details,
            (wants_details & state["raw"]).nonzero()[0],
            LogitBias.pack(lists["bias_token_ids"], lists["biases"], self.device),
            is_plain=bool(state["is_plain"].all()),
            modifiers=Modifiers.of(params),
        )


def find_problem(message: pb.OpenRow, limits: RowLimits) -> str | None:
    """Return why a row cannot be served, without regard to its soft prompt and adapter; else None."""
    token_ids = read_column(message.token_ids)
    limit = message.prompt_len + message.max_new_tokens
    max_length = limits.max_sequence_length
    if len(token_ids) == 0:
        return "it has no token ids"
    if _has_unknown(token_ids, limits):
        return f"a token id is not below the model's vocabulary size {limits.vocab_size}"
    if max(limit, len(token_ids)) > max_length:
        return f"{limit} tokens exceed the maximum sequence length {max_length}"
    bias_token_ids = read_column(message.sampling.bias_token_ids)
    if len(bias_token_ids) != len(np.frombuffer(message.sampling.biases, "<f4")):
        return "it does not have one bias per biased token id"
    if _has_unknown(bias_token_ids, limits):
        return f"a token id with a bias is not below the model's vocabulary size {limits.vocab_size}"
    if limits.is_encoder_decoder:
        return _find_encoder_problem(message, limits)
    return "the model has no encoder" if message.encoder_token_ids else None


def _find_encoder_problem(message: pb.OpenRow, limits: RowLimits) -> str | None:
    token_ids = read_column(message.encoder_token_ids)
    num_blocks = len(read_column(message.cross_blocks))
    if len(token_ids) == 0:
        return "it has no token ids for the encoder"
    if _has_unknown(token_ids, limits):
        return f"a token id for the encoder is not below the model's vocabulary size {limits.vocab_size}"
    if len(token_ids) > limits.max_sequence_length:
        return f"{len(token_ids)} tokens for the encoder exceed the maximum {limits.max_sequence_length}"
    if len(token_ids) > num_blocks * limits.block_size:
        return f"{len(token_ids)} tokens for the encoder do not fit into {num_blocks} cross blocks"
    return None


def _has_unknown(token_ids: TokenIds, limits: RowLimits) -> bool:
    return bool(((token_ids < 0) | (token_ids >= limits.vocab_size)).any())


def _find_missing(message: pb.OpenRow, prompt: LoadedPrompt | None, adapter: Adapter | None) -> str | None:
    """Return why a row cannot be served with its soft prompt and adapter; else None."""
    if message.prompt_digest and prompt is None:
        return "its soft prompt is not loaded"
    if message.adapter_digest and adapter is None:
        return "its adapter is not loaded"
    if prompt is None:
        return None
    encoder_len = len(read_column(message.encoder_token_ids))
    if len(prompt.decoder) > message.prompt_len or len(prompt.encoder) > encoder_len:
        return "it has fewer tokens than its soft prompt"
    return None
