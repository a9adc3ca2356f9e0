"""Attention of one query per sequence, in segments of keys that are merged afterwards."""

import torch
from torch import Tensor

from tgis.shard.attention.interface import Scoring
from tgis.shard.kernels.cuda.step_state import Segments
from tgis.shard.kernels.portable.attention import KEYS, Piece, attend_piece


def launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    segments: Segments,
    max_seq_len: int,
    scoring: Scoring,
) -> Tensor:
    """Return the attention of q, contiguous [num_seqs, num_heads, head_dim], as the same shape and type.

    keys, values: [num_blocks, num_kv_heads, block_size, head_dim], one layer of the cache. A causal query is
    its sequence's last token; others see the whole sequence. No sequence is longer than `max_seq_len`."""
    raise NotImplementedError


def plain(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    segments: Segments,
    max_seq_len: int,
    scoring: Scoring,
) -> Tensor:
    num_blocks = -(-max_seq_len // keys.shape[2])
    count = max(1, KEYS // max(1, max_seq_len))  # sequences that are computed together
    parts = []
    for start in range(0, len(q), count):
        some = slice(start, start + count)
        lengths = segments.seq_lens[some].long().unsqueeze(1)  # [n, 1]
        blocks = block_tables[segments.rows[some].long(), :num_blocks].long()
        piece = Piece(torch.arange(len(lengths), device=q.device).unsqueeze(1), lengths - 1, lengths, blocks)
        parts.append(attend_piece(q[some].unsqueeze(1), keys, values, piece, scoring).squeeze(1))
    return torch.cat(parts)
