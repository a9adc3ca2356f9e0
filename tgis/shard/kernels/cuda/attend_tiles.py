"""Attention of consecutive queries of a sequence, in tiles (FlashAttention-2: Dao, 2023)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgis.shard.attention.interface import Scoring
from tgis.shard.kernels.cuda.functions.float8 import FLOAT8_TYPES, Float8Form, as_bytes
from tgis.shard.kernels.cuda.functions.processors import find_capability
from tgis.shard.kernels.cuda.functions.scoring import (
    ScoreArguments,
    Sizes,
    add_sinks,
    are_addressable,
    attend_span,
    begin_softmax,
)
from tgis.shard.kernels.portable.attention import KEYS, Piece, attend_piece
from tgis.shard.memory.kv_cache import UNSCALED, CacheScale

MAX_TILES = 65_535  # of a launch, the limit of the grid's second dimension
QUERIES = 128  # maximum rows of a tile: tokens times query heads per key/value head


def tile_tokens(group_size: int) -> int:
    """Return the maximum tokens of a tile for `group_size` query heads per key/value head."""
    return max(1, QUERIES // group_size)


def choose_sizes(q: Tensor, keys: Tensor, scoring: Scoring) -> tuple[Sizes, dict[str, int]]:
    """Return the sizes of a program and its compiler options. Larger programs run out of registers."""
    _, num_kv_heads, block_size, head_dim = keys.shape
    group = q.shape[1] // num_kv_heads
    width = max(16, triton.next_power_of_2(head_dim))
    has_bias = scoring.bias is not None
    # 9.x and 10.x multiply from shared memory, and have 227 KB of it; others have 99 KB at least.
    capability = find_capability(keys.device)
    has_much_memory = 90 <= capability < 120
    if q.dtype == torch.float32:  # not for tensor cores: threads hold whole rows of operands
        rows, num_keys, num_warps = (64, 32, 8) if width <= 64 else (16, 16, 4)
    else:
        is_wide = width > (128 if has_much_memory else 64)
        rows = 128
        # The loops of a window spill registers of narrow heads on 10.x.
        is_narrow = width <= 64 and capability >= 100 and scoring.window is not None
        num_keys = 32 if is_wide or has_bias or is_narrow else 64
        num_warps = 8
        # The conversion of 8-bit floats takes registers, too.
        if width > 128 and (has_bias or not has_much_memory or keys.dtype in FLOAT8_TYPES):
            rows = 64
        elif is_wide and not has_much_memory:  # with 8 warps and 128 rows, some registers are spilled
            rows, num_warps = 64, 4
    sizes = Sizes(group, num_kv_heads, head_dim, block_size, width, rows, num_keys, Float8Form.of(keys))
    return sizes, {"num_warps": num_warps, "num_stages": 3 if has_much_memory else 2}


@triton.jit
def find_spans(position, tokens, length, score, KEYS: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the first key that any of the tokens sees, the first and the end of the whole blocks that all
    see, and the end of what any sees."""
    last = length
    full = length // KEYS * KEYS
    if CAUSAL:
        last = tl.minimum(position + tokens, length)
        full = tl.minimum(position + 1, length) // KEYS * KEYS
    first, begin = 0, 0
    if score.window is not None:
        first = tl.minimum(tl.maximum(position + 1 - score.window, 0), length)
        begin = tl.minimum(tl.cdiv(tl.maximum(position + tokens - score.window, 0), KEYS) * KEYS, full)
    if score.chunk is not None:
        last_token = position + tokens - 1
        first = tl.minimum(position - position % score.chunk, length)
        begin = tl.minimum(tl.cdiv(last_token - last_token % score.chunk, KEYS) * KEYS, full)
    return first, begin, full, last


# What differs between steps, or may begin anywhere in some other tensor, makes no variants of the kernel.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["block_tables", "tiles"])
def attend_tiles_kernel(
    q, keys, values, block_tables, tiles, table_stride, score, out, SIZES: tl.constexpr, CAUSAL: tl.constexpr
):
    """Compute a tile, or a part of it, for all query heads of one key/value head. The last tiles start first:
    those of long sequences take the longest."""
    num_heads: tl.constexpr = SIZES.num_kv_heads * SIZES.group
    head_stride: tl.constexpr = SIZES.block_size * SIZES.head_dim
    kv_head = tl.program_id(0)
    tile = tiles + (tl.num_programs(1) - 1 - tl.program_id(1)) * 5
    count, position, length = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    start = tl.program_id(2) * SIZES.rows
    if start >= count * SIZES.group:
        return
    row = start + tl.arange(0, SIZES.rows)
    channel = tl.arange(0, SIZES.width)
    token = row // SIZES.group
    heads = kv_head * SIZES.group + row % SIZES.group
    place = (tl.load(tile + 1).to(tl.int64) + token) * num_heads + heads
    place = place[:, None] * SIZES.head_dim + channel[None, :]
    is_stored = (token < count)[:, None] & (channel < SIZES.head_dim)[None, :]
    q_rows = tl.load(q + place, mask=is_stored, other=0.0)
    pages = (
        keys + kv_head * head_stride,
        values + kv_head * head_stride,
        block_tables + tl.load(tile).to(tl.int64) * table_stride,
    )
    rows = position + token, heads
    tokens_before = start // SIZES.group
    tokens = tl.minimum(count, (start + SIZES.rows - 1) // SIZES.group + 1) - tokens_before
    first, begin, full, last = find_spans(position + tokens_before, tokens, length, score, SIZES.keys, CAUSAL)
    state = begin_softmax(SIZES.rows, SIZES.width)
    if score.window is not None or score.chunk is not None:
        seen = first // SIZES.keys * SIZES.keys
        state = attend_span(
            state, q_rows, pages, rows, (seen, begin, first, last), score, SIZES, CAUSAL, True
        )
    state = attend_span(state, q_rows, pages, rows, (begin, full, first, last), score, SIZES, CAUSAL, False)
    state = attend_span(state, q_rows, pages, rows, (full, last, first, last), score, SIZES, CAUSAL, True)
    best, mass, acc = state
    if score.sinks is not None:
        mass = add_sinks(mass, best, score.sinks, heads)
    y = acc / tl.where(mass > 0, mass, 1.0)[:, None]
    if score.value_scale is not None:
        y *= score.value_scale
    tl.store(out + place, y.to(out.dtype.element_ty), mask=is_stored)


def launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    tiles: Tensor,
    max_seq_len: int,
    scoring: Scoring,
    out: Tensor,
    stored: CacheScale = UNSCALED,
) -> None:
    """Write the attention of the tiles' tokens to their rows of `out`, which has the shape and type of q.

    q: contiguous [num_tokens, num_heads, head_dim]. keys, values: [num_blocks, num_kv_heads, block_size,
    head_dim], one layer of the cache. tiles: int32 [num_tiles, 5]: row in the block tables, first token,
    number of tokens (up to `tile_tokens`; 0: idle tile), position of the first token, and length of the
    sequence (up to `max_seq_len`). Causal queries attend to keys up to their position, others to the whole
    sequence. Keys and values may have 8 bits, with the divisors `stored`."""
    num_kv_heads = keys.shape[1]
    assert are_addressable(q, keys, values, block_tables)
    assert out.is_contiguous()
    assert tiles.is_contiguous()
    if not len(tiles):
        return
    sizes, options = choose_sizes(q, keys, scoring)
    parts = triton.cdiv(tile_tokens(sizes.group) * sizes.group, sizes.rows)
    for grid_tiles in tiles.split(MAX_TILES):
        attend_tiles_kernel[num_kv_heads, len(grid_tiles), parts](
            q,
            as_bytes(keys),
            as_bytes(values),
            block_tables,
            grid_tiles,
            block_tables.stride(0),
            ScoreArguments.of(scoring, keys, stored),
            out,
            sizes,
            scoring.causal,
            **options,
        )


def plain(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    tiles: Tensor,
    max_seq_len: int,
    scoring: Scoring,
    out: Tensor,
    stored: CacheScale = UNSCALED,
) -> None:
    num_blocks = -(-max_seq_len // keys.shape[2])
    place = torch.arange(tile_tokens(q.shape[1] // keys.shape[1]), device=q.device)
    results = q.new_zeros(len(q) + 1, *q.shape[1:])  # the last row receives results of no token
    is_written = torch.zeros(len(q) + 1, dtype=torch.bool, device=q.device)
    count = max(1, KEYS // max(1, max_seq_len))  # tiles computed at once
    for start in range(0, len(tiles), count):
        row, first, counts, position, length = tiles[start : start + count].long().unsqueeze(2).unbind(1)
        is_token = place < counts  # [n, tile_tokens]
        tokens = torch.where(is_token, first + place, len(q))
        blocks = block_tables[row.squeeze(1), :num_blocks].long()
        piece = Piece(tokens, position + place, length, blocks)
        some = q[tokens.clamp(max=len(q) - 1)]
        results[tokens] = attend_piece(some, keys, values, piece, scoring, stored)
        is_written.index_fill_(0, tokens.flatten(), True)
    out.copy_(torch.where(is_written[:-1, None, None], results[:-1], out))
