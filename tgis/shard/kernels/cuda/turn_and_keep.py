"""Splits qkv, normalises and rotates heads, and writes keys and values to the cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgis.shard.attention.interface import Heads
from tgis.shard.kernels.cuda.functions.dependent_launch import is_dependent, wait_for_inputs
from tgis.shard.kernels.cuda.functions.float8 import Float8Form, as_bytes, round_plain, round_to_float8
from tgis.shard.kernels.portable.ops import split_heads
from tgis.shard.memory.kv_cache import UNSCALED, CacheScale

# Pairs of channels, or unrotated channels, per program. A thread has eight of them, 16 bytes of float16 or
# bfloat16.
ITEMS, NUM_WARPS = 512, 2


def launch(
    qkv: Tensor,
    heads: Heads,
    angles: Tensor | None,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    stored: CacheScale = UNSCALED,
) -> Tensor:
    """Write keys and values to the cache. Return the queries, [num_tokens, num_heads, head_dim], in the type
    of qkv.

    qkv: contiguous [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]. angles: float32
    [2, num_tokens, half], see `Attention.run`. keys, values: [num_blocks, num_kv_heads, block_size,
    head_dim], one layer of the cache. slot_mapping: int64 [num_tokens], valid slots block * block_size +
    offset. Keys and values of 8 bits are divided by `stored`."""
    num_tokens, (block_size, head_dim) = len(qkv), keys.shape[2:]
    half = 0 if angles is None else angles.shape[2]
    assert all(x is None or x.is_contiguous() for x in (qkv, angles, keys, values)), (
        "kernels assume contiguous tensors"
    )
    queries = qkv.new_empty(num_tokens, heads.num_heads, head_dim)
    width = triton.next_power_of_2(max(half, head_dim - 2 * half))
    block_heads = min(max(ITEMS // width, 1), triton.next_power_of_2(heads.num_heads))
    num_q, num_kv = (triton.cdiv(n, block_heads) for n in (heads.num_heads, heads.num_kv_heads))
    norm, is_early = heads.norm, is_dependent(qkv.device)
    _turn_and_keep[(num_tokens, num_q + 2 * num_kv)](
        qkv,
        angles,
        None if norm is None else norm.q_weight,
        None if norm is None else norm.k_weight,
        slot_mapping,
        queries,
        as_bytes(keys),
        as_bytes(values),
        1 / stored.key,
        1 / stored.value,
        0.0 if norm is None else norm.eps,
        NUM_HEADS=heads.num_heads,
        NUM_KV_HEADS=heads.num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_SIZE=block_size,
        BLOCK_HEADS=block_heads,
        FLOAT8=Float8Form.of(keys),
        IS_DEPENDENT=is_early,
        num_warps=NUM_WARPS,
        launch_pdl=is_early,
    )
    return queries


def plain(
    qkv: Tensor,
    heads: Heads,
    angles: Tensor | None,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    stored: CacheScale = UNSCALED,
) -> Tensor:
    q, k, v = split_heads(qkv.float(), heads.num_heads, heads.num_kv_heads, angles, heads.norm)
    keep(k, keys, slot_mapping, stored.key)
    keep(v, values, slot_mapping, stored.value)
    return q.to(qkv.dtype)


def keep(fresh: Tensor, pages: Tensor, slot_mapping: Tensor, scale: float = 1.0) -> None:
    """Write keys or values, [num_tokens, num_kv_heads, head_dim], to the pages of one layer of the cache.
    Those of 8 bits are divided by `scale`."""
    block_size = pages.shape[2]
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    kept = round_plain(fresh, pages.dtype, 1 / scale)
    as_bytes(pages)[blocks, :, slot_mapping % block_size] = as_bytes(kept)


# Programs of a token: first for queries, then for keys, then for values, BLOCK_HEADS heads each.
@triton.jit
def _turn_and_keep(
    qkv,
    angles,
    q_weight,
    k_weight,
    slot_mapping,
    queries,
    keys,
    values,
    key_factor,
    value_factor,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    FLOAT8: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    if IS_DEPENDENT:
        wait_for_inputs()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    NUM_Q: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    NUM_KV: tl.constexpr = (NUM_KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    q = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    if part < NUM_Q:
        head = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        out = queries + token * (NUM_HEADS * HEAD_DIM)
        _turn(q, out, HEAD_DIM, head, NUM_HEADS, angles, token, q_weight, eps, 1.0, HEAD_DIM, HALF, None)
    else:
        slot = tl.load(slot_mapping + token)
        page = slot // BLOCK_SIZE * (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM) + slot % BLOCK_SIZE * HEAD_DIM
        STRIDE: tl.constexpr = BLOCK_SIZE * HEAD_DIM
        k = q + NUM_HEADS * HEAD_DIM
        if part < NUM_Q + NUM_KV:
            head = (part - NUM_Q) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
            # A variable has the same type in both branches, even if nothing reads it after them.
            of_key = k_weight, eps, key_factor
            _turn(k, keys + page, STRIDE, head, NUM_KV_HEADS, angles, token, *of_key, HEAD_DIM, HALF, FLOAT8)
        else:
            head = (part - NUM_Q - NUM_KV) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
            v = k + NUM_KV_HEADS * HEAD_DIM
            of_value = None, eps, value_factor
            _turn(v, values + page, STRIDE, head, NUM_KV_HEADS, None, token, *of_value, HEAD_DIM, 0, FLOAT8)


@triton.jit
def _turn(
    x,
    out,
    out_stride,
    head,
    num_heads,
    angles,
    token,
    weight,
    eps,
    factor,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    """Normalise, rotate and write heads of one token, [BLOCK_HEADS]."""
    REST: tl.constexpr = HEAD_DIM - 2 * HALF  # unrotated channels
    is_head = (head < num_heads)[:, None]
    x += head[:, None] * HEAD_DIM
    out += head[:, None] * out_stride
    if HALF > 0:
        i = tl.arange(0, triton.next_power_of_2(HALF))
        is_pair = is_head & (i < HALF)[None, :]
        one = tl.load(x + i[None, :], mask=is_pair, other=0).to(tl.float32)
        other = tl.load(x + HALF + i[None, :], mask=is_pair, other=0).to(tl.float32)
    if REST > 0:
        j = 2 * HALF + tl.arange(0, triton.next_power_of_2(REST))
        is_rest = is_head & (j < HEAD_DIM)[None, :]
        rest = tl.load(x + j[None, :], mask=is_rest, other=0).to(tl.float32)
    if weight is not None:
        squares = 0.0
        if HALF > 0:
            squares += tl.sum(one * one + other * other, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        if HALF > 0:
            one *= scale * tl.load(weight + i, mask=i < HALF)[None, :]
            other *= scale * tl.load(weight + HALF + i, mask=i < HALF)[None, :]
        if REST > 0:
            rest *= scale * tl.load(weight + j, mask=j < HEAD_DIM)[None, :]
    if HALF > 0:
        cosines = tl.load(angles + token * HALF + i, mask=i < HALF)[None, :]
        sines = tl.load(angles + (tl.num_programs(0) + token) * HALF + i, mask=i < HALF)[None, :]
        turned = one * cosines - other * sines, other * cosines + one * sines
        tl.store(out + i[None, :], _round(turned[0], factor, FLOAT8), mask=is_pair)
        tl.store(out + HALF + i[None, :], _round(turned[1], factor, FLOAT8), mask=is_pair)
    if REST > 0:
        tl.store(out + j[None, :], _round(rest, factor, FLOAT8), mask=is_rest)


@triton.jit
def _round(x, factor, FLOAT8: tl.constexpr):
    """Return the codes of x * factor, or x if the cache has more than 8 bits."""
    return x if FLOAT8 is None else round_to_float8(x * factor, FLOAT8)
