"""State of rows on a device, and its updates by the host."""

from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tgis.shard.kernels.cuda.step_state import (
    MAX_BIASES,
    MAX_COUNT,
    MAX_STOP_IDS,
    OFF_WORDS,
    RowState,
    Word,
    as_float,
)
from tgis.shard.runner.device.uploads import Words
from tgis.shard.runner.row_table import Integers, RowLimits, TokenIds
from tgis.shard.sampling.sampler import SeenTokens

IN_PROMPT = 1 << 15  # bit in a token's count
MAX_WORD = np.iinfo(np.int32).max

Array = TypeVar("Array", Words, Tensor)


class RowUpdates(NamedTuple, Generic[Array]):
    """Updates of rows, int32, on the host or on the device."""

    rows: Array  # [num_rows], rows whose words are replaced
    words: Array  # [num_rows, len(Word)]
    opened_rows: Array  # [num_opened]
    stop_ids: Array  # [num_opened, MAX_STOP_IDS]
    cross_blocks: Array  # [num_cross_blocks, 3]: row, index in its table, block
    unbiased_rows: Array  # [any], rows whose biases are removed before `biases` are added
    biases: Array  # [num_biases, 4]: row, index, token id, bits of the bias
    uncounted_rows: Array  # [any], rows whose counts are reset to 0 before `counts` are set
    counts: Array  # [num_counts, 3]: row, token id, count, as in `RowState.token_counts`


def allocate_rows(max_rows: int, limits: RowLimits, dummy_block: int, device: torch.device) -> RowState:
    """Allocate the state of the rows. The last row is the idle row."""

    def table(width: int, value: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full((max_rows + 1, width), value, dtype=dtype, device=device)

    max_blocks = -(-limits.max_sequence_length // limits.block_size)
    words = table(len(Word), 0)
    words[:, Word.ENDED] = 1
    for word, value in OFF_WORDS.items():
        words[:, word] = _bits_of(value)
    return RowState(
        words=words,
        block_tables=table(max_blocks, dummy_block),
        cross_tables=table(max_blocks if limits.is_encoder_decoder else 1, dummy_block),
        stop_ids=table(MAX_STOP_IDS, -1),
        bias_token_ids=table(MAX_BIASES, -1),
        biases=table(MAX_BIASES, 0, torch.float32),
        token_counts=table(limits.vocab_size, 0, torch.int16),
        masks=table(-(-limits.vocab_size // 32), 0),
        greens=table(-(-limits.vocab_size // 32), 0),
        dummy_slot=dummy_block * limits.block_size,
    )


def apply_updates(updates: RowUpdates[Tensor], state: RowState) -> None:
    """Apply updates to the rows' state without waiting."""
    state.words.index_copy_(0, updates.rows.long(), updates.words)
    if len(updates.opened_rows):
        state.stop_ids.index_copy_(0, updates.opened_rows.long(), updates.stop_ids)
    if len(updates.cross_blocks):
        rows, indices, blocks = updates.cross_blocks.unbind(1)
        state.cross_tables.index_put_((rows.long(), indices.long()), blocks)
    if len(updates.unbiased_rows):
        state.bias_token_ids.index_fill_(0, updates.unbiased_rows.long(), -1)
    if len(updates.biases):
        rows, indices, token_ids, biases = updates.biases.unbind(1)
        at = rows.long(), indices.long()
        state.bias_token_ids.index_put_(at, token_ids)
        state.biases.index_put_(at, as_float(biases))
    if len(updates.uncounted_rows):
        state.token_counts.index_fill_(0, updates.uncounted_rows.long(), 0)
    if len(updates.counts):
        rows, token_ids, counts = updates.counts.unbind(1)
        state.token_counts.index_put_((rows.long(), token_ids.long()), counts.to(torch.int16))


class CountedTokens(SeenTokens):
    """`SeenTokens` over the counts on the device, which the device's sampler updates."""

    def __init__(self, token_counts: Tensor):
        self._counts = token_counts

    def start(self, row: int, token_ids: TokenIds) -> None:
        """Do nothing, because `RowUpdates` sets the counts."""

    def add(self, rows: Integers, token_ids: TokenIds) -> None:
        """Do nothing, because `count` counts the tokens of all rows that need it."""

    def count(self, rows: Integers, token_ids: TokenIds) -> None:
        """Count one token per row that the host has sampled."""
        at = tuple(
            torch.from_numpy(each.astype(np.int64)).to(self._counts.device) for each in (rows, token_ids)
        )
        counts = self._counts[at].int()
        self._counts[at] = (counts + ((counts & MAX_COUNT) < MAX_COUNT)).to(torch.int16)

    def select(self, rows: Integers) -> Tensor:
        return self._counts[torch.from_numpy(rows).to(self._counts.device)] != 0


def count_tokens(prompt: TokenIds, generated: TokenIds) -> tuple[TokenIds, Words]:
    """Return the distinct token ids of a sequence and their counts. The prompt excludes virtual tokens."""
    in_prompt = np.unique(prompt)
    token_ids, numbers = np.unique(generated, return_counts=True)
    ids = np.union1d(in_prompt, token_ids)
    counts = np.zeros(len(ids), np.int32)
    counts[np.searchsorted(ids, token_ids)] = np.minimum(numbers, MAX_COUNT)
    counts[np.searchsorted(ids, in_prompt)] |= IN_PROMPT
    return ids, counts


def make_words(rows: npt.NDArray[np.void], **others: npt.NDArray[np.generic]) -> Words:
    """Return the words of rows [n] of the host's table. `others` has the words that are not in the table, by
    name in lower case."""
    words = np.zeros((len(rows), len(Word)), np.int32)
    seeds = rows["seed"].astype("<u8").view("<i4").reshape(-1, 2)
    words[:, Word.SEED_LOW] = seeds[:, 0]
    words[:, Word.SEED_HIGH] = seeds[:, 1]
    for word in set(Word) - {Word.SEED_LOW, Word.SEED_HIGH, Word.MUST_END}:
        name = word.name.lower()
        values = others[name] if name in others else rows[name]
        if values.dtype.kind == "f":
            words[:, word] = values.astype("<f4").view("<i4")
        else:
            words[:, word] = np.minimum(values, MAX_WORD)
    return words


def _bits_of(value: float) -> int:
    return int(np.float32(value).view(np.int32))
