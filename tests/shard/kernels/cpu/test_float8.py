"""8-bit keys and values: stored and read values of all numbers against torch's types, scales, and NaN and
infinity."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.shard.attention_scene import PLAIN, Scene, Shape
from tests.support.shard.float8_numbers import (
    E4M3,
    E5M2,
    HEAD_DIM,
    LARGEST,
    finite_codes,
    hard_numbers,
    round_as_torch,
)
from tests.support.shard.stepping import make_layout
from tgis.shard.kernels.cpu.attention.attention import CpuAttention
from tgis.shard.memory.kv_cache import CacheScale, KVCache

DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2])
BLOCK_SIZE = 16


def write(dtype: torch.dtype, k: Tensor, v: Tensor, scale: CacheScale | None = None) -> KVCache:
    """Write one sequence with these keys and values, [num_tokens, HEAD_DIM]."""
    num_blocks = -(-len(k) // BLOCK_SIZE)
    cache = KVCache(1, num_blocks, BLOCK_SIZE, 1, HEAD_DIM, dtype, scales=[scale] if scale else ())
    attention = CpuAttention(cache)
    plan = attention.plan(make_layout([(0, len(k))], [list(range(num_blocks))]), "self")
    attention.keep(0, k[:, None], v[:, None], plan)
    return cache


def stored(cache: KVCache, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values in the cache, [num_tokens, HEAD_DIM] each."""
    keys = cache.keys[0].view(torch.uint8).view(-1, HEAD_DIM, BLOCK_SIZE).transpose(1, 2)
    values = cache.values[0].view(torch.uint8).view(-1, HEAD_DIM)
    return tuple(x.reshape(-1, HEAD_DIM)[:num_tokens] for x in (keys, values))


@DTYPES
def test_every_number_is_stored_as_torch_rounds_it(dtype: torch.dtype) -> None:
    numbers = hard_numbers(dtype)
    x = torch.where(numbers.isnan(), 0.0, numbers).view(-1, HEAD_DIM)
    for actual in stored(write(dtype, x, x), len(x)):
        assert torch.equal(actual, round_as_torch(x, dtype))


@DTYPES
def test_scales_divide_what_is_stored_and_multiply_what_is_read(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    k, v = torch.randn(2, 48, HEAD_DIM) * torch.tensor([2000.0, 0.003])[:, None, None]
    scale = CacheScale(5.3, 2.0**-14)
    cache = write(dtype, k, v, scale)
    for actual, x, one in zip(stored(cache, 48), (k, v), scale, strict=True):
        assert torch.equal(actual, round_as_torch(x * torch.tensor(1 / one), dtype))
    layout = make_layout([(0, 48)], [list(range(3))])
    exact = [code.view(dtype).double() * one for code, one in zip(stored(cache, 48), scale, strict=True)]
    read = CpuAttention(cache).read(0, layout.block_tables[0], 48)
    for actual, expected in zip(read, exact, strict=True):
        torch.testing.assert_close(actual[0].double(), expected, rtol=1e-7, atol=0)
    attention, q = CpuAttention(cache), torch.randn(48, 3, HEAD_DIM) / 5000
    out = attention.attend(0, q, attention.plan(layout, "self"), PLAIN)
    scores = torch.einsum("qhd,kd->hqk", q.double(), exact[0]) * PLAIN.scale
    weights = scores.masked_fill(torch.ones(48, 48).triu(1).bool(), -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,kd->qhd", weights, exact[1])
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=1e-5 * float(expected.abs().max()))


@DTYPES
def test_every_code_is_read_exactly(dtype: torch.dtype) -> None:
    """As a value: a single key has weight 1. As a key: it determines the score of one of two keys."""
    codes = finite_codes(dtype)
    for code in codes.split(HEAD_DIM):
        x = torch.cat([code, torch.zeros(HEAD_DIM - len(code))])
        attention = CpuAttention(write(dtype, torch.zeros(1, HEAD_DIM), x[None]))
        q = torch.ones(1, 1, HEAD_DIM)
        plan = attention.plan(make_layout([(0, 1)], [[0]]), "self")
        assert torch.equal(attention.attend(0, q, plan, PLAIN)[0, 0], x)
    for channel in (0, 1, HEAD_DIM - 1):
        k, v = torch.zeros(2, 2 * len(codes), HEAD_DIM)
        k[1::2, channel], v[1::2] = codes, 1.0
        attention = CpuAttention(write(dtype, k, v))
        plan = attention.plan(make_layout([(0, len(k))], [list(range(len(k) // BLOCK_SIZE + 1))]), "self")
        q = torch.ones(len(k), 1, HEAD_DIM) * 0.9 / LARGEST[dtype]
        scoring = replace(PLAIN, scale=1.0, window=2)
        actual = attention.attend(0, q, plan, scoring)[1::2, 0, 0]
        expected = (codes.double() * 0.9 / LARGEST[dtype]).sigmoid()
        torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0)


@DTYPES
@pytest.mark.parametrize("part", ["k", "v"])
def test_nan_stays_nan(dtype: torch.dtype, part: str) -> None:
    """The result is NaN for every query that attends to the token, and for no other sequence."""
    for block_size, head_dim in ((16, 64), (10, 13)):
        scene = Scene(Shape(3, 1, head_dim, block_size, dtype), [90, 70])
        getattr(scene, part)[75, 0, 7] = torch.nan
        scene.write_all()
        plain, windowed = (scene.attend({0: (60, 90), 1: (0, 70)}, each) for each in (PLAIN, WINDOWED))
        at = torch.arange(60, 90)
        for actual, seen in ((plain, at >= 75), (windowed, (at >= 75) & (at < 75 + 5))):
            is_nan = actual[0].isnan().any(2)
            assert is_nan[seen].all()
            # As with other types, a weight of 0 times NaN is NaN.
            assert not is_nan[~seen].any() or (dtype, part) == (E5M2, "v")
            assert actual[1].isfinite().all()


WINDOWED = replace(PLAIN, window=5)


@DTYPES
def test_infinite_numbers_become_the_largest(dtype: torch.dtype) -> None:
    x = torch.tensor([torch.inf, -torch.inf, 3e38, -3e38]).repeat(HEAD_DIM // 4)[None]
    for actual in stored(write(dtype, x, x), 1):
        assert torch.equal(actual.view(dtype).float(), x.sign() * LARGEST[dtype])
