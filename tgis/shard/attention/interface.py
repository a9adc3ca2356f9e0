"""What every attention implementation is given and must do; nothing above it knows how pages are laid out."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

TILE = 32  # tokens of one sequence that are attended with together at most


@dataclass(frozen=True)
class AttentionMetadata:
    """Where a step's tokens live; the new tokens of all sequences are packed along one axis.

    A sequence's new tokens are its last ones. Its block table names, in order, the blocks of its keys and
    values; entries behind them are never read. A token whose slot is negative is not kept.

    Where the new tokens look into other sequences, a decoder's into its encoder's, they have no position in
    them: no window, slope or bias can be asked for, and there are no slots."""

    cu_seqlens_q: Tensor  # int32 [num_seqs + 1], new tokens of the sequences, cumulated
    seq_lens: Tensor  # int32 [num_seqs], cached and new tokens
    block_tables: Tensor  # int32 [num_seqs, max_blocks]
    slot_mapping: Tensor  # int64 or int32 [num_tokens], block * block_size + offset
    is_cross: bool = False  # the new tokens are not of the sequences: seq_lens counts cached ones only

    @cached_property
    def tiles(self) -> Tensor:
        """int32 [num_tiles, 4]: sequence, first token in the step, number of tokens, the first's position.

        The costliest come first, so that threads which take one after the other end together."""
        begins, lengths = self.cu_seqlens_q.numpy(), self.seq_lens.numpy()
        if (begins == np.arange(len(begins))).all():
            return torch.from_numpy(_lay_single_tokens(lengths, self.is_cross))
        return torch.from_numpy(_cut(begins.astype(np.int64), lengths.astype(np.int64), self.is_cross))

    @cached_property
    def table(self) -> Tensor:
        """int64 [9], on the CPU: all that a compiled kernel needs to know of a step, in one place, which
        another step's table may be copied to.

        Numbers of tokens, sequences, entries of a block table, tiles, and tokens of a tile at most; the
        addresses of seq_lens, block_tables, tiles and slot_mapping, whose memory lives as long as this."""
        tensors = self._kept
        addresses = [x.data_ptr() for x in tensors]
        num_seqs, max_blocks = self.block_tables.shape
        num_tokens = int(self.cu_seqlens_q.numpy()[-1])
        most = 1 if num_tokens == num_seqs == len(tensors[2]) else TILE
        table = (num_tokens, num_seqs, max_blocks, len(tensors[2]), most, *addresses)
        return torch.from_numpy(np.array(table, np.int64))

    @cached_property
    def _kept(self) -> tuple[Tensor, ...]:
        slots = self.slot_mapping.to(torch.int64).contiguous()
        return self.seq_lens.contiguous(), self.block_tables.contiguous(), self.tiles, slots


def _lay_single_tokens(lengths: Any, is_cross: bool) -> Any:
    """The tiles of sequences with a new token each."""
    tiles = np.empty((len(lengths), 4), np.int32)
    order = np.argsort(-lengths, kind="stable") if len(lengths) > 1 else 0
    tiles[:, 0] = tiles[:, 1] = order
    tiles[:, 2], tiles[:, 3] = 1, 0 if is_cross else lengths[order] - 1
    return tiles


def _cut(begins: Any, lengths: Any, is_cross: bool) -> Any:
    counts = begins[1:] - begins[:-1]  # [num_seqs]
    tiles_of = (counts + TILE - 1) // TILE
    sequence = np.repeat(np.arange(len(counts)), tiles_of)  # [num_tiles]
    before = (tiles_of.cumsum() - tiles_of)[sequence]  # tiles of the sequences before
    offset = (np.arange(len(sequence)) - before) * TILE
    count = np.minimum(counts[sequence] - offset, TILE)
    position = (lengths - counts)[sequence] + offset
    seen = position + count
    if is_cross:
        position, seen = np.zeros_like(position), lengths[sequence]
    tiles = np.stack((sequence, begins[sequence] + offset, count, position), 1)
    return tiles[np.argsort(-seen * count, kind="stable")].astype(np.int32)


@dataclass(frozen=True)
class Scoring:
    """How the score of a query and a key becomes a weight: first the scale, then cap, slope, bias and hiding.

    Distance is the key's position less the query's."""

    scale: float
    causal: bool = True  # otherwise every query sees the whole sequence
    window: int | None = None  # keys that a query sees, its own included
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)
    slopes: Tensor | None = None  # float32 [num_heads], added times distance (ALiBi)
    bias: Tensor | None = None  # float32 [num_heads, 2 * reach + 1], added by distance, from -reach to reach


class Attention(Protocol):
    """Keeps and reads the keys and values of this rank's heads; float32 in and out.

    Keys and values are always read as the cache holds them, fresh ones too: `write` comes before `attend`."""

    def write(self, layer: int, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> None:
        """k, v: [num_tokens, num_kv_heads, head_dim]."""

    def attend(self, layer: int, q: Tensor, metadata: AttentionMetadata, scoring: Scoring) -> Tensor:
        """q: [num_tokens, num_heads, head_dim] -> the same shape."""

    def read(self, layer: int, block_table: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence's first `seq_len` tokens, copied: float32
        [num_kv_heads, seq_len, head_dim]. block_table: int32 [max_blocks]."""
