"""`Attention` of GPUs. Single queries are computed in segments, several queries of a sequence in tiles."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tgis.shard.attention.interface import AttentionKind, AttentionPlan, Heads, Scoring, StepLayout
from tgis.shard.kernels.cuda.attend_tiles import tile_tokens
from tgis.shard.kernels.cuda.functions.float8 import as_bytes
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.step_state import Segments, count_segments
from tgis.shard.kernels.cuda.turn_and_keep import keep
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.memory.placing import move


class QueryTile(NamedTuple):
    """Consecutive new tokens of one sequence."""

    row: int  # row in the block tables
    first: int  # index of the first token in the step
    num_tokens: int
    position: int  # position of the first token
    seq_len: int


@dataclass(frozen=True)
class CudaPlan:
    """Plan of a step. Its first tokens are the only new tokens of their sequences."""

    slot_mapping: Tensor  # int64 [num_tokens]; not used by cross-attention
    block_tables: Tensor  # int32 [num_rows, max_blocks]
    segments: Segments  # of the sequences of the first tokens
    tiles: Tensor  # int32 [num_tiles, 5], a `QueryTile` per row, for the other tokens
    max_seq_len: int  # upper bound on the lengths of sequences

    def copy_into(self, fixed: "CudaPlan") -> None:
        raise AssertionError("a captured step on a GPU reads the tensors that begin_step writes")


class CudaAttention:
    """Attention over a cache whose last block is the dummy block. `group_size` is the number of query heads
    per key/value head."""

    def __init__(self, cache: KVCache, kernels: Implementations, group_size: int):
        # [num_layers, num_blocks, num_kv_heads, block_size, head_dim]
        self._keys, self._values = (
            pages.view(*pages.shape[:3], cache.block_size, cache.head_dim)
            for pages in (cache.keys, cache.values)
        )
        self._scales = cache.scales
        self._kernels = kernels
        self._block_size = cache.block_size
        self._device = cache.keys.device
        self.tile_tokens = tile_tokens(group_size)

    def plan(self, layout: StepLayout, kind: AttentionKind) -> CudaPlan:
        """Plan a step whose layout is on the host, such as an encoder's or a speculator's."""
        begins, lengths = layout.cu_seqlens_q.tolist(), layout.seq_lens.tolist()
        are_single = kind != "encoder" and begins == list(range(len(begins)))
        spans = []
        for row, (begin, end) in enumerate(() if are_single else pairwise(begins)):
            position = 0 if kind == "cross" else lengths[row] - (end - begin)
            spans.append(QueryTile(row, begin, end - begin, position, lengths[row]))
        tiles = torch.tensor(list(cut_tiles(spans, self.tile_tokens)), dtype=torch.int32).view(-1, 5)
        slots = layout.positions if kind == "cross" else self._find_slots(layout)
        seq_lens = layout.seq_lens if are_single else layout.seq_lens[:0]
        starts = torch.zeros(len(seq_lens) + 1, dtype=torch.int32)
        starts[1:] = count_segments(seq_lens).cumsum(0)
        rows = torch.arange(len(seq_lens), dtype=torch.int32)
        to = self._device
        return CudaPlan(
            move(slots, to),
            move(layout.block_tables, to),
            Segments(move(rows, to), move(seq_lens, to), move(starts, to)),
            move(tiles, to),
            max(lengths, default=0),
        )

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values, [num_blocks, num_kv_heads, block_size, head_dim] each."""
        return self._keys[layer], self._values[layer]

    def run(
        self,
        layer: int,
        qkv: Tensor,
        heads: Heads,
        angles: Tensor | None,
        plan: AttentionPlan,
        scoring: Scoring,
    ) -> Tensor:
        assert isinstance(plan, CudaPlan)
        stored = self._scales[layer]
        q = self._kernels.turn_and_keep(qkv, heads, angles, *self.pages(layer), plan.slot_mapping, stored)
        return self.attend(layer, q, plan, scoring)

    def keep(self, layer: int, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        assert isinstance(plan, CudaPlan)
        scale = self._scales[layer]
        keep(k, self._keys[layer], plan.slot_mapping, scale.key)
        keep(v, self._values[layer], plan.slot_mapping, scale.value)

    def attend(self, layer: int, q: Tensor, plan: AttentionPlan, scoring: Scoring) -> Tensor:
        assert isinstance(plan, CudaPlan)
        pages = *self.pages(layer), plan.block_tables
        num_single = len(plan.segments.rows)
        stored = self._scales[layer]
        if not len(plan.tiles):
            return self._kernels.attend_segments(q, *pages, plan.segments, plan.max_seq_len, scoring, stored)
        out = torch.empty_like(q)
        if num_single:
            out[:num_single] = self._kernels.attend_segments(
                q[:num_single], *pages, plan.segments, plan.max_seq_len, scoring, stored
            )
        self._kernels.attend_tiles(q, *pages, plan.tiles, plan.max_seq_len, scoring, out, stored)
        return out

    def read(self, layer: int, block_table: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        blocks = block_table[: -(-seq_len // self._block_size)].long()
        k, v = (
            as_bytes(pages[layer])[blocks].view(pages.dtype).transpose(0, 1).flatten(1, 2).float()
            for pages in (self._keys, self._values)
        )
        scale = self._scales[layer]
        return k[:, :seq_len] * scale.key, v[:, :seq_len] * scale.value

    def _find_slots(self, layout: StepLayout) -> Tensor:
        slots = layout.find_slots(self._block_size)
        dummy_slot = (self._keys.shape[1] - 1) * self._block_size
        return slots.where(slots >= 0, dummy_slot)


def cut_tiles(spans: Iterable[QueryTile], max_tokens: int) -> Iterator[QueryTile]:
    """Split spans, tiles with any number of tokens, into tiles of up to `max_tokens` tokens."""
    for row, first, count, position, seq_len in spans:
        for start in range(0, count, max_tokens):
            yield QueryTile(row, first + start, min(max_tokens, count - start), position + start, seq_len)
