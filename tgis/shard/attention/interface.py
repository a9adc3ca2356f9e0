"""The interface of attention: a step's layout, its plan, and methods. Code above it knows neither the cache's
layout nor a plan's contents."""

from dataclasses import dataclass
from typing import Literal, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from tgis.shard.layers.ops import HeadNorm

# Attention of new tokens to their own sequences, of an encoder's tokens to each other, and of a decoder's
# tokens to their encoder's.
AttentionKind = Literal["self", "encoder", "cross"]


@dataclass(frozen=True)
class StepLayout:
    """Places of a step's tokens, on the CPU. The new tokens of all sequences are packed along one axis.

    A sequence's new tokens are its last ones. Its block table lists, in order, the blocks of its keys and
    values; entries after them are never read. Keys and values of tokens in a negative block are not stored.

    In cross-attention, a decoder's tokens attend to its encoder's sequence, whose cached tokens `seq_lens`
    counts, and have no position in it. So no window, slope or bias is possible, and nothing is stored."""

    cu_seqlens_q: Tensor  # int32 [num_seqs + 1], cumulative numbers of the sequences' new tokens
    positions: Tensor  # int64 [num_tokens]
    seq_lens: Tensor  # int32 [num_seqs], number of cached and new tokens
    block_tables: Tensor  # int32 [num_seqs, max_blocks]

    def find_slots(self, block_size: int) -> Tensor:
        """Return block * block_size + offset of each new token, int64 [num_tokens]."""
        begins, positions = self.cu_seqlens_q.numpy(), self.positions.numpy()
        sequence = np.repeat(np.arange(len(begins) - 1), np.diff(begins))  # [num_tokens]
        blocks = self.block_tables.numpy()[sequence, positions // block_size].astype(np.int64)
        return torch.from_numpy(blocks * block_size + positions % block_size)


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


@dataclass(frozen=True)
class Heads:
    """This rank's heads of queries, keys and values, as they lie in rows of qkv."""

    num_heads: int
    num_kv_heads: int
    norm: HeadNorm | None = None  # of queries and keys


class AttentionPlan(Protocol):
    """All that a platform's attention prepares once for all layers of a step."""

    def copy_into(self, fixed: Self) -> None:
        """Make `fixed`, the plan of a captured step, that of this step. Both have as many new tokens."""


class Attention(Protocol):
    """Attention of this rank's heads, float32 in and out. All keys and values, new ones too, are read from
    the cache."""

    def plan(self, layout: StepLayout, kind: AttentionKind) -> AttentionPlan:
        """Prepare the attention of a step. The plan is valid for this object only."""

    def run(
        self,
        layer: int,
        qkv: Tensor,
        heads: Heads,
        angles: Tensor | None,
        plan: AttentionPlan,
        scoring: Scoring,
    ) -> Tensor:
        """Attend with new tokens after their keys and values were written to the cache.

        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]. The heads of q and k are normalised.
        Then their first channels are rotated by `angles`, as many as it has cosines and sines; channel i is
        paired with channel i + half of them. Returns [num_tokens, num_heads, head_dim]."""

    def keep(self, layer: int, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        """Write keys and values, [num_tokens, num_kv_heads, head_dim], to the cache."""

    def attend(self, layer: int, q: Tensor, plan: AttentionPlan, scoring: Scoring) -> Tensor:
        """Compute attention of queries [num_tokens, num_heads, head_dim] to what is in the cache; return the
        same shape."""

    def read(self, layer: int, block_table: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values of a sequence's first `seq_len` tokens, each float32
        [num_kv_heads, seq_len, head_dim]. block_table: int32 [max_blocks]."""
