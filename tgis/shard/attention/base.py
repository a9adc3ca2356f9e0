"""What every attention implementation is given and must do; nothing above it knows how pages are laid out."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

TILE = 16  # tokens of one sequence that a unit of work attends with at most


@dataclass(frozen=True)
class AttentionMetadata:
    """Where a step's tokens live; the new tokens of all sequences are packed along one axis.

    A sequence's new tokens are its last ones. Its block table names the blocks that hold its keys and values in order;
    what stands behind the last of them is never read. A negative slot is not written."""

    cu_seqlens_q: Tensor  # int32 [num_seqs + 1], new tokens of the sequences, cumulated
    seq_lens: Tensor  # int32 [num_seqs], cached and new tokens
    block_tables: Tensor  # int32 [num_seqs, max_blocks]
    slot_mapping: Tensor  # int64 or int32 [num_tokens], block * block_size + offset

    @cached_property
    def tiles(self) -> Tensor:
        """int32 [num_tiles, 4]: sequence, row of the first token, number of tokens, position of the first token.

        The costliest come first, so that threads which take one after the other end together."""
        starts = self.cu_seqlens_q[:-1].long()
        counts = self.cu_seqlens_q.diff().long()
        tiles_of = (counts + TILE - 1) // TILE
        sequence = torch.repeat_interleave(tiles_of)  # [num_tiles]
        number = torch.arange(len(sequence)) - (tiles_of.cumsum(0) - tiles_of)[sequence]
        offset = number * TILE
        count = (counts[sequence] - offset).clamp(max=TILE)
        position = self.seq_lens[sequence] - counts[sequence] + offset
        tiles = torch.stack((sequence, starts[sequence] + offset, count, position), 1)
        cost = (position + count) * count
        return tiles[cost.argsort(descending=True, stable=True)].to(torch.int32)


@dataclass(frozen=True)
class Scoring:
    """How the score of a query and a key becomes a weight: scale, then cap, then slope and bias, then what is hidden."""

    scale: float
    causal: bool = True  # otherwise every query sees the whole sequence
    window: int | None = None  # keys a query sees, its own included
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)
    slopes: Tensor | None = None  # float32 [num_heads], times key position less query position (ALiBi)
    bias: Tensor | None = None  # float32 [num_heads, 2 * reach + 1], by key position less query position, from -reach


class Attention(Protocol):
    """Keeps and reads the keys and values of this rank's heads; float32 in and out.

    Keys and values are always read as the cache holds them, fresh ones too: `write` comes before `attend`."""

    def write(self, layer: int, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> None:
        """k, v: [num_tokens, num_kv_heads, head_dim]."""

    def attend(self, layer: int, q: Tensor, metadata: AttentionMetadata, scoring: Scoring) -> Tensor:
        """q: [num_tokens, num_heads, head_dim] -> the same shape."""
