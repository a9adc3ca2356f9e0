"""The interface of attention: metadata and methods. Code above it does not know the cache's layout."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

QUERY_TILE = 32  # most tokens of one sequence that a tile of queries holds


@dataclass(frozen=True)
class AttentionMetadata:
    """Places of a step's tokens in the KV cache. The new tokens of all sequences are packed along one axis.

    A sequence's new tokens are its last ones. Its block table lists, in order, the blocks of its keys and
    values; entries after them are never read. Keys and values of a token with a negative slot are not stored.

    In cross-attention, a decoder's tokens attend to its encoder's sequence and have no position in it. So no
    window, slope or bias is possible, and there are no slots."""

    cu_seqlens_q: Tensor  # int32 [num_seqs + 1], cumulative numbers of the sequences' new tokens
    seq_lens: Tensor  # int32 [num_seqs], number of cached and new tokens
    block_tables: Tensor  # int32 [num_seqs, max_blocks]
    slot_mapping: Tensor  # int64 or int32 [num_tokens], block * block_size + offset
    is_cross: bool = False  # True for cross-attention; then seq_lens counts cached tokens only

    @cached_property
    def tiles(self) -> Tensor:
        """Tiles int32 [num_tiles, 4]: the sequence, the index in the step of the first token, the number of
        tokens, and the first token's position. The costliest come first, so that threads finish together."""
        begins, lengths = self.cu_seqlens_q.numpy(), self.seq_lens.numpy()
        if (begins == np.arange(len(begins))).all():
            return torch.from_numpy(_tile_single_tokens(lengths, self.is_cross))
        return torch.from_numpy(
            _tile_tokens(begins.astype(np.int64), lengths.astype(np.int64), self.is_cross)
        )

    @cached_property
    def table(self) -> Tensor:
        """Table int64 [9], on the CPU, with all data of a step that a compiled kernel needs. A replay copies
        another step's table to the same place.

        It holds the numbers of tokens, sequences, entries of a block table and tiles, the largest number of
        tokens of a tile, and the addresses of seq_lens, block_tables, tiles and slot_mapping. Their memory
        lives as long as this object."""
        tensors = self._tensors
        addresses = [x.data_ptr() for x in tensors]
        num_seqs, max_blocks = self.block_tables.shape
        num_tokens = int(self.cu_seqlens_q.numpy()[-1])
        most = 1 if num_tokens == num_seqs == len(tensors[2]) else QUERY_TILE
        table = (num_tokens, num_seqs, max_blocks, len(tensors[2]), most, *addresses)
        return torch.from_numpy(np.array(table, np.int64))

    @cached_property
    def _tensors(self) -> tuple[Tensor, ...]:
        slots = self.slot_mapping.to(torch.int64).contiguous()
        return self.seq_lens.contiguous(), self.block_tables.contiguous(), self.tiles, slots


def _tile_single_tokens(lengths: Any, is_cross: bool) -> Any:
    tiles = np.empty((len(lengths), 4), np.int32)
    order = np.argsort(-lengths, kind="stable") if len(lengths) > 1 else 0
    tiles[:, 0] = tiles[:, 1] = order
    tiles[:, 2], tiles[:, 3] = 1, 0 if is_cross else lengths[order] - 1
    return tiles


def _tile_tokens(begins: Any, lengths: Any, is_cross: bool) -> Any:
    counts = begins[1:] - begins[:-1]  # [num_seqs]
    tiles_of = (counts + QUERY_TILE - 1) // QUERY_TILE
    sequence = np.repeat(np.arange(len(counts)), tiles_of)  # [num_tiles]
    before = (tiles_of.cumsum() - tiles_of)[sequence]  # number of tiles of earlier sequences
    offset = (np.arange(len(sequence)) - before) * QUERY_TILE
    count = np.minimum(counts[sequence] - offset, QUERY_TILE)
    position = (lengths - counts)[sequence] + offset
    seen = position + count
    if is_cross:
        position, seen = np.zeros_like(position), lengths[sequence]
    tiles = np.stack((sequence, begins[sequence] + offset, count, position), 1)
    return tiles[np.argsort(-seen * count, kind="stable")].astype(np.int32)


@dataclass(frozen=True)
class Scoring:
    """Changes to attention scores before the softmax, in this order: scale, cap, slope, bias and mask. A
    distance is the key's position minus the query's."""

    scale: float
    causal: bool = True  # if False, every query attends to the whole sequence
    window: int | None = None  # number of keys that a query attends to, its own included
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)
    slopes: Tensor | None = None  # float32 [num_heads], slope * distance is added (ALiBi)
    bias: Tensor | None = None  # float32 [num_heads, 2 * reach + 1], added for distances -reach to reach


class Attention(Protocol):
    """Attention of this rank's heads, float32 in and out. All keys and values, new ones too, are read from
    the cache, so callers call `write` before `attend`."""

    def write(self, layer: int, k: Tensor, v: Tensor, metadata: AttentionMetadata) -> None:
        """Write keys and values, [num_tokens, num_kv_heads, head_dim], to the cache."""

    def attend(self, layer: int, q: Tensor, metadata: AttentionMetadata, scoring: Scoring) -> Tensor:
        """Compute attention of queries [num_tokens, num_heads, head_dim]; return the same shape."""

    def read(self, layer: int, block_table: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values of a sequence's first `seq_len` tokens, each float32
        [num_kv_heads, seq_len, head_dim]. block_table: int32 [max_blocks]."""
