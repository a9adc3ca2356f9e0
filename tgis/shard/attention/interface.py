"""Interface of attention: a step's layout, its plan, and the methods. Callers know neither the cache's layout
nor a plan's contents."""

from dataclasses import dataclass
from typing import Literal, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from tgis.shard.layers.ops import HeadNorm

# self: new tokens attend to their own sequence. encoder: tokens of an encoder attend to each other. cross:
# tokens of a decoder attend to those of their encoder.
AttentionKind = Literal["self", "encoder", "cross"]


@dataclass(frozen=True)
class StepLayout:
    """Layout of a step's tokens, on the CPU. The new tokens of all sequences are packed along one axis.

    The new tokens of a sequence are its last ones. Its block table lists the blocks of its keys and values in
    order; later entries are never read. Keys and values of tokens in a negative block are not stored.

    In cross-attention, `seq_lens` counts the cached tokens of the encoder. The decoder's tokens have no
    position among them, so windows, slopes and biases do not apply, and nothing is stored."""

    cu_seqlens_q: Tensor  # int32 [num_seqs + 1], cumulative number of new tokens
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
    """Transformation of attention scores before the softmax, in this order: scale, soft cap, slope, bias,
    mask. A distance is the key's position minus the query's."""

    scale: float
    causal: bool = True  # if False, every query attends to the whole sequence
    window: int | None = None  # number of keys that a query attends to, including its own
    chunk: int | None = None  # a query attends to keys whose position // chunk equals its own; no window then
    first_key: int = 0  # keys at positions before it are hidden
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap)
    slopes: Tensor | None = None  # float32 [num_heads], ALiBi: adds slope * distance
    bias: Tensor | None = None  # float32 [num_heads, 2 * reach + 1], added for distances -reach to reach
    sinks: Tensor | None = None  # float32 [num_heads], score of one more key per head, which has no value


@dataclass(frozen=True)
class Heads:
    """This rank's heads of queries, keys and values, in the order of a row of qkv."""

    num_heads: int
    num_kv_heads: int  # 0 in layers that read the keys and values of an earlier layer
    norm: HeadNorm | None = None  # of queries, keys and values


class AttentionPlan(Protocol):
    """Data that a platform's attention prepares once for all layers of a step."""

    def copy_into(self, fixed: Self) -> None:
        """Copy this plan into `fixed`, the plan of a captured step with the same number of new tokens."""


class Attention(Protocol):
    """Attention of this rank's heads, float32 in and out. It reads all keys and values, including new ones,
    from the cache."""

    def plan(self, layout: StepLayout, kind: AttentionKind) -> AttentionPlan:
        """Prepare a step. The plan is valid only for this object."""

    def run(
        self,
        layer: int,
        qkv: Tensor,
        heads: Heads,
        angles: Tensor | None,
        plan: AttentionPlan,
        scoring: Scoring,
    ) -> Tensor:
        """Write the keys and values of new tokens to the cache. Return the tokens' attention.

        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; its row stride may be larger. First, the
        heads of q and k are normalised. Then `angles`, [2, num_tokens, half], rotates their first 2 * half
        channels: channel i is paired with channel i + half. Returns [num_tokens, num_heads, head_dim]."""

    def keep(self, layer: int, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        """Write keys and values, [num_tokens, num_kv_heads, head_dim], to the cache."""

    def attend(self, layer: int, q: Tensor, plan: AttentionPlan, scoring: Scoring) -> Tensor:
        """Return the attention of queries q to the cache. q and result: [num_tokens, num_heads, head_dim]."""

    def read(self, layer: int, block_table: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values of a sequence's first `seq_len` tokens, each float32
        [num_kv_heads, seq_len, head_dim]. block_table: int32 [max_blocks]."""
