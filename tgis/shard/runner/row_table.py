"""What a shard keeps of the sequences in generation, in arrays by row. All of it can be made again from the
router's messages."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tgis.pb import shard_pb2 as pb
from tgis.shard.adapters.registry import Contents
from tgis.shard.adapters.row_adapters import Tuning
from tgis.shard.runner.opening import (
    ROW,
    Limits,
    find_missing,
    find_problem,
    read_column,
    read_parameters,
    read_row,
)
from tgis.shard.sampling.logprobs import Wanted
from tgis.shard.sampling.sampler import PARAMETERS, SamplingBatch, SeenTokens, find_plain

Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]
TokenIds = npt.NDArray[np.int32]

# Choices of rows whose traits are kept: a step that continues another one has the same.
MAX_KEPT = 16


@dataclass(frozen=True)
class Traits:
    """What is the same of n rows from step to step."""

    params: npt.NDArray[np.void]  # PARAMETERS [n]
    eos_token_ids: TokenIds  # [n, any], padded with -1
    prompt_len: Integers  # [n]
    wanted: Wanted
    described: Booleans  # [n], where anything is wanted
    is_plain: bool  # all are greedy, by scores that nothing changes


class Rows:
    """The open rows: at most `max_rows`, of `max_sequence_length` tokens at most.

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
        self._rows = rows = np.zeros(max_rows, ROW)
        self._open, self._ended, self._lengths, self._end, self._num_blocks, self._input_from = (
            rows[name] for name in ("open", "ended", "length", "limit", "num_blocks", "input_from")
        )
        self._params = np.zeros(max_rows, PARAMETERS)
        self._eos = np.full((max_rows, 1), -1, np.int32)
        # Of these three, only the pages that are written to take memory.
        self._token_ids = np.zeros((max_rows, max_sequence_length), np.int32)
        self._block_tables = np.zeros((max_rows, -(-max_sequence_length // block_size)), np.int32)
        self._cross_tables = np.zeros_like(self._block_tables)
        self.seen = SeenTokens(vocab_size, device)
        self._contents, self._tuning = contents, Tuning(max_rows, device)
        self._traits: dict[bytes, Traits] = {}

    def reset(self) -> None:
        self._open[:] = False
        self._traits.clear()
        self._tuning.reset()

    def close(self, rows: Integers) -> None:
        if len(rows):
            self._open[rows] = False
            self._traits.clear()
            self._tuning.close(rows.tolist())

    def open(self, message: pb.OpenRow) -> str | None:
        """The row belongs to this sequence now, whoever had it before. A text says why it cannot be served;
        then it has ended."""
        row, token_ids = message.row, read_column(message.token_ids)
        prompt = self._contents.prompt(message.prompt_digest)
        adapter = self._contents.adapter(message.adapter_digest)
        self._traits.clear()
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
        self._ended[rows] = True

    def append(self, rows: Integers, token_ids: TokenIds) -> Booleans:
        """Each of the rows [n] is a token longer; bool [n], where that was its last one."""
        traits, lengths = self.traits(rows), self._lengths[rows]
        self._token_ids[rows, lengths] = token_ids
        lengths += 1
        self._lengths[rows] = lengths
        ended: Booleans = (traits.eos_token_ids == token_ids[:, None]).any(-1)
        ended |= lengths >= self._end[rows]
        self._ended[rows] = ended
        if not traits.is_plain:
            penalised = traits.params["repetition_penalty"] != 1
            if penalised.any():
                self.seen.add(rows[penalised], token_ids[penalised])
        return ended

    def traits(self, rows: Integers) -> Traits:
        """Of rows [n], any."""
        key = rows.tobytes()
        traits = self._traits.get(key)
        if traits is None:
            if len(self._traits) >= MAX_KEPT:
                self._traits.clear()
            traits = self._traits[key] = self._find_traits(rows)
        return traits

    def sampling_batch(
        self, rows: Integers, described: Booleans, must_end: Booleans | np.bool_
    ) -> SamplingBatch:
        traits, lengths = self.traits(rows), self._lengths[rows]
        return SamplingBatch(
            rows,
            traits.params,
            lengths - traits.prompt_len,
            lengths,
            traits.eos_token_ids,
            described,
            must_end,
            traits.is_plain,
        )

    def _find_traits(self, rows: Integers) -> Traits:
        state, params = self._rows[rows], self._params[rows]
        wanted = Wanted(state["logprobs"], state["ranks"], state["top_n"])
        is_plain = find_plain(params)
        return Traits(params, self._eos[rows], state["prompt_len"], wanted, wanted.anything, is_plain)

    def _set_eos(self, row: int, token_ids: TokenIds) -> None:
        missing = len(token_ids) - self._eos.shape[1]
        if missing > 0:
            self._eos = np.pad(self._eos, ((0, 0), (0, missing)), constant_values=-1)
        self._eos[row] = -1
        self._eos[row, : len(token_ids)] = token_ids
