"""Attention of several consecutive queries of a sequence, in tiles."""

import torch
from torch import Tensor

from tgis.shard.attention.interface import Scoring
from tgis.shard.kernels.portable.attention import KEYS, Piece, attend_piece

QUERIES = 128  # rows of a tile: its tokens times the query heads of one key/value head


def tile_tokens(group_size: int) -> int:
    """Return the most tokens of a tile, for `group_size` query heads per head of keys and values."""
    return max(1, QUERIES // group_size)


def launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    tiles: Tensor,
    max_seq_len: int,
    scoring: Scoring,
    out: Tensor,
) -> None:
    """Write the attention of the tiles' tokens to `out`, of the shape and type of q, and nothing else.

    q: contiguous [num_tokens, num_heads, head_dim]. keys, values: [num_blocks, num_kv_heads, block_size,
    head_dim], one layer of the cache. tiles: int32 [num_tiles, 5]: row in the block tables, first token,
    number of tokens (at most `tile_tokens`; 0: an idle tile), position of the first token, and length of the
    sequence, at most `max_seq_len`. A causal query sees keys up to its position, others the whole
    sequence."""
    raise NotImplementedError


def plain(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    tiles: Tensor,
    max_seq_len: int,
    scoring: Scoring,
    out: Tensor,
) -> None:
    num_blocks = -(-max_seq_len // keys.shape[2])
    place = torch.arange(tile_tokens(q.shape[1] // keys.shape[1]), device=q.device)
    found = q.new_zeros(len(q) + 1, *q.shape[1:])  # the last one takes what belongs to no token
    is_found = torch.zeros(len(q) + 1, dtype=torch.bool, device=q.device)
    count = max(1, KEYS // max(1, max_seq_len))  # tiles that are computed together
    for start in range(0, len(tiles), count):
        row, first, counts, position, length = tiles[start : start + count].long().unsqueeze(2).unbind(1)
        is_token = place < counts  # [n, tile_tokens]
        tokens = torch.where(is_token, first + place, len(q))
        blocks = block_tables[row.squeeze(1), :num_blocks].long()
        piece = Piece(tokens, position + place, length, blocks)
        found[tokens] = attend_piece(q[tokens.clamp(max=len(q) - 1)], keys, values, piece, scoring)
        is_found[tokens] = True
    out.copy_(torch.where(is_found[:-1, None, None], found[:-1], out))
