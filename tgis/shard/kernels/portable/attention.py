"""Attention in plain torch operators, for any device. Gathers pages and computes scores in float32. Sequences
with the same number of new tokens are computed together, within a limit on memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch
from torch import Tensor

from tgis.shard.attention.interface import AttentionKind, AttentionPlan, Heads, Scoring, StepLayout
from tgis.shard.kernels.portable.ops import split_heads
from tgis.shard.memory.kv_cache import UNSCALED, CacheScale, KVCache

# Maximum numbers of keys gathered at once, and of pairs of a query and a key scored at once. A single
# sequence or query may exceed them.
KEYS, PAIRS = 1 << 16, 1 << 22


class TorchAttention:
    def __init__(self, cache: KVCache):
        self._cache = cache
        self._keys = _as_pages(cache, cache.keys)
        self._values = _as_pages(cache, cache.values)

    def plan(self, layout: StepLayout, kind: AttentionKind) -> "TorchPlan":
        device = self._cache.keys.device
        block_size = self._cache.block_size
        pieces = [piece.to(device) for piece in _cut_pieces(layout, block_size)]
        slots = torch.empty(0, dtype=torch.int64) if kind == "cross" else layout.find_slots(block_size)
        stored = (slots >= 0).nonzero().squeeze(1)
        slots = slots[stored]
        places = (stored, slots // block_size, slots % block_size)
        return TorchPlan(pieces, tuple(x.to(device) for x in places))

    def run(
        self,
        layer: int,
        qkv: Tensor,
        heads: Heads,
        angles: Tensor | None,
        plan: AttentionPlan,
        scoring: Scoring,
    ) -> Tensor:
        q, k, v = split_heads(qkv, heads.num_heads, heads.num_kv_heads, angles, heads.norm)
        if heads.num_kv_heads:
            self.keep(layer, k, v, plan)
        return self.attend(layer, q, plan, scoring)

    def keep(self, layer: int, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        assert isinstance(plan, TorchPlan)
        stored, block, offset = plan.stored
        for pages, fresh in ((self._keys, k), (self._values, v)):
            # [num_stored, num_kv_heads, head_dim]
            pages[layer][block, :, offset] = fresh[stored].to(self._cache.dtype)

    def attend(self, layer: int, q: Tensor, plan: AttentionPlan, scoring: Scoring) -> Tensor:
        assert isinstance(plan, TorchPlan)
        out = torch.empty_like(q)
        for piece in plan.pieces:
            pages = self._keys[layer], self._values[layer]
            out[piece.tokens] = attend_piece(q[piece.tokens], *pages, piece, scoring)
        return out

    def read(self, layer: int, block_table: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        blocks = block_table[: -(-seq_len // self._cache.block_size)].long()
        k, v = (pages[layer][blocks].transpose(0, 1).flatten(1, 2) for pages in (self._keys, self._values))
        return k[:, :seq_len].float(), v[:, :seq_len].float()


@dataclass
class TorchPlan:
    pieces: "list[Piece]"
    stored: tuple[Tensor, ...]  # int64 [num_stored] each: tokens to store, and their blocks and offsets

    def copy_into(self, fixed: "TorchPlan") -> None:
        fixed.pieces = self.pieces
        fixed.stored = self.stored


@dataclass(frozen=True)
class Piece:
    """Equal numbers of new tokens of n sequences, and the keys that they may attend to."""

    tokens: Tensor  # int64 [n, count], indices into the step's tokens
    positions: Tensor  # int64 [n, count]
    lengths: Tensor  # int64 [n, 1], of the sequences
    blocks: Tensor  # int64 [n, max_blocks]; 0 (any block) after the end of a sequence

    def to(self, device: torch.device) -> "Piece":
        tensors = (self.tokens, self.positions, self.lengths, self.blocks)
        return Piece(*(x.to(device) for x in tensors))


def _cut_pieces(layout: StepLayout, block_size: int) -> Iterator[Piece]:
    begins, lengths = layout.cu_seqlens_q.tolist(), layout.seq_lens.tolist()
    counts = [end - begin for begin, end in pairwise(begins)]
    order = sorted(range(len(counts)), key=lambda i: (counts[i], lengths[i]))
    for count, same_count in groupby(order, counts.__getitem__):
        for batch in _cut([(i, lengths[i]) for i in same_count if count]):
            longest = lengths[batch[-1]]
            step = max(1, PAIRS // max(1, len(batch) * longest))
            for skip in range(0, count, step):
                yield _piece(layout, block_size, batch, range(skip, min(skip + step, count)), longest)


def _cut(sequences: list[tuple[int, int]]) -> Iterator[list[int]]:
    """Yield runs of sequences to compute batch, padded to the longest. `sequences` are sorted by length."""
    batch: list[int] = []
    for sequence, length in sequences:
        if batch and (len(batch) + 1) * length > KEYS:
            yield batch
            batch = []
        batch.append(sequence)
    if batch:
        yield batch


def _piece(layout: StepLayout, block_size: int, sequences: list[int], which: range, longest: int) -> Piece:
    """Return the piece of these sequences, with only `which` of their new tokens."""
    index = torch.tensor(sequences)
    place = torch.arange(which.start, which.stop)  # [count]
    begins, ends = layout.cu_seqlens_q[index].long(), layout.cu_seqlens_q[index + 1].long()
    lengths = layout.seq_lens[index].long()
    first = lengths - (ends - begins)  # first positions, [n]; unused in cross-attention
    num_blocks = -(-longest // block_size)
    blocks = layout.block_tables[index, :num_blocks].long()
    is_unused = torch.arange(num_blocks) * block_size >= lengths.unsqueeze(1)
    return Piece(
        tokens=begins.unsqueeze(1) + place,
        positions=first.unsqueeze(1) + place,
        lengths=lengths.unsqueeze(1),
        blocks=blocks.masked_fill(is_unused, 0),
    )


def _as_pages(cache: KVCache, elements: Tensor) -> Tensor:
    """View elements as [num_layers, num_blocks, num_kv_heads, block_size, head_dim]."""
    return elements.view(*elements.shape[:3], cache.block_size, cache.head_dim)


def _gather(pages: Tensor, piece: Piece) -> Tensor:
    """Gather keys or values, float32 [n, num_kv_heads, length, head_dim]. Elements after a sequence's end are
    0."""
    gathered = pages[piece.blocks].transpose(1, 2).flatten(2, 3).float()
    at = torch.arange(gathered.shape[2], device=gathered.device)
    return gathered.masked_fill_((at >= piece.lengths)[:, None, :, None], 0.0)


def attend_piece(
    q: Tensor, keys: Tensor, values: Tensor, piece: Piece, scoring: Scoring, stored: CacheScale = UNSCALED
) -> Tensor:
    """Return the attention of q, [n, count, num_heads, head_dim], to the pages of one layer, [num_blocks,
    num_kv_heads, block_size, head_dim], in the shape and type of q. `stored` has the divisors of pages."""
    scoring = replace(scoring, scale=scoring.scale * stored.key)
    y = _attend(q.float(), _gather(keys, piece), _gather(values, piece), piece, scoring)
    return (y * stored.value).to(q.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, piece: Piece, scoring: Scoring) -> Tensor:
    """Return the attention of q, [n, count, num_heads, head_dim]. Query heads that share a key/value head
    become rows of one product."""
    n, count, num_heads, head_dim = q.shape
    _, num_kv_heads, length, _ = k.shape
    rows = num_heads // num_kv_heads * count
    scores = q.transpose(1, 2).reshape(n, num_kv_heads, rows, head_dim) @ k.transpose(2, 3)
    distance, hidden = _mask_keys(piece, length, scoring)
    scores = _adjust_scores(scores.view(n, num_heads, count, length), distance, scoring)
    weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
    if scoring.sinks is not None:
        weights *= (scores.logsumexp(-1, keepdim=True) - scoring.sinks[:, None, None]).sigmoid()
    weights = weights.masked_fill_(hidden, 0.0)  # queries without visible keys get zeros
    y = weights.view(n, num_kv_heads, rows, length) @ v
    return y.view(n, num_heads, count, head_dim).transpose(1, 2)


def _mask_keys(piece: Piece, length: int, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Return distances (int64) and the mask of hidden keys (bool), [n, 1, count, length] each."""
    at = torch.arange(length, device=piece.positions.device)
    distance = at - piece.positions.unsqueeze(-1)  # [n, count, length]
    hidden = ((at >= piece.lengths) | (at < scoring.first_key)).unsqueeze(1).expand_as(distance)
    if scoring.causal:
        hidden = hidden | (distance > 0)
    if scoring.window:
        hidden = hidden | (distance <= -scoring.window)
    if scoring.chunk:
        hidden = hidden | (at < (piece.positions // scoring.chunk * scoring.chunk).unsqueeze(-1))
    return distance.unsqueeze(1), hidden.unsqueeze(1)


def _adjust_scores(scores: Tensor, distance: Tensor, scoring: Scoring) -> Tensor:
    """Apply scale, soft cap, slopes and bias to scores [n, num_heads, count, length], in place."""
    scores *= scoring.scale
    if scoring.soft_cap:
        scores = scores.div_(scoring.soft_cap).tanh_().mul_(scoring.soft_cap)
    if scoring.slopes is not None:
        scores += scoring.slopes[:, None, None] * distance
    if scoring.bias is not None:
        reach = scoring.bias.shape[1] // 2
        places = distance.squeeze(1).clamp(-reach, reach) + reach  # [n, count, length]
        scores += scoring.bias[:, places].transpose(0, 1)
    return scores
