"""What every attention implementation is given and must do; nothing above it knows how pages are laid out."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

TILE = 16  # tokens of one sequence that are attended with together at most


@dataclass(frozen=True)
class AttentionMetadata:
    """Where a step's tokens live; the new tokens of all sequences are packed along one axis.

    A sequence's new tokens are its last ones. Its block table names, in order, the blocks of its keys and
    values; entries behind them are never read. A token whose slot is negative is not kept."""

    cu_seqlens_q: Tensor  # int32 [num_seqs + 1], new tokens of the sequences, cumulated
    seq_lens: Tensor  # int32 [num_seqs], cached and new tokens
    block_tables: Tensor  # int32 [num_seqs, max_blocks]
    slot_mapping: Tensor  # int64 or int32 [num_tokens], block * block_size + offset

    @cached_property
    def tiles(self) -> Tensor:
        """int32 [num_tiles, 4]: sequence, first token in the step, number of tokens, the first's position.

        The costliest come first, so that threads which take one after the other end together."""
        counts = self.cu_seqlens_q.diff()  # [num_seqs]
        tiles_of = (counts + TILE - 1) // TILE
        sequence = torch.repeat_interleave(tiles_of)  # [num_tiles]
        before = (tiles_of.cumsum(0) - tiles_of)[sequence]  # tiles of the sequences before
        offset = (torch.arange(len(sequence)) - before) * TILE
        count = (counts[sequence] - offset).clamp(max=TILE)
        position = (self.seq_lens - counts)[sequence] + offset
        tiles = torch.stack((sequence, self.cu_seqlens_q[sequence] + offset, count, position), 1)
        cost = (position + count) * count
        return tiles[cost.argsort(descending=True, stable=True)].to(torch.int32)


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
