"""Keys and values of 8-bit integers: codes and scales against float32 arithmetic of torch, and NaN, infinity
and zero."""

import pytest
import torch
from torch import Tensor

from tests.support.shard.attention_scene import PLAIN, Scene, Shape, rotate
from tests.support.shard.stepping import make_layout
from tgis.shard.kernels.cpu.attention.attention import CpuAttention
from tgis.shard.memory.kv_cache import KVCache

HEAD_DIM, BLOCK_SIZE = 64, 16


def write(k: Tensor, v: Tensor) -> KVCache:
    """Write one sequence with these keys and values, [num_tokens, HEAD_DIM]."""
    num_blocks = -(-len(k) // BLOCK_SIZE)
    cache = KVCache(1, num_blocks, BLOCK_SIZE, 1, HEAD_DIM, torch.int8)
    attention = CpuAttention(cache)
    plan = attention.plan(make_layout([(0, len(k))], [list(range(num_blocks))]), "self")
    attention.keep(0, k[:, None], v[:, None], plan)
    return cache


def stored(cache: KVCache, num_tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Return the codes, [num_tokens, HEAD_DIM], and the scales of the keys, and those of the values."""
    parts = []
    for pages, is_key in ((cache.keys[0, :, 0], True), (cache.values[0, :, 0], False)):
        codes, scales = pages.split([HEAD_DIM * BLOCK_SIZE, 4 * BLOCK_SIZE], -1)
        codes = codes.unflatten(-1, (HEAD_DIM, BLOCK_SIZE)).mT if is_key else codes
        scales = scales.contiguous().view(torch.float32).flatten()
        parts.append((codes.reshape(-1, HEAD_DIM)[:num_tokens], scales[:num_tokens]))
    return parts


def test_codes_and_scales_are_those_of_float32_arithmetic() -> None:
    torch.manual_seed(1)
    sizes = torch.tensor([1e-29, 1e-5, 1.0, 300.0, 1e30]).repeat(10)[:, None]
    k, v = torch.randn(2, 50, HEAD_DIM) * sizes
    k[3, 7] = 4000.0  # a single large channel
    v[4] = torch.arange(HEAD_DIM) - 20.5  # ties: every code is a half more
    v[4, 0] = 127.0
    for (codes, scales), x in zip(stored(write(k, v), 50), (rotate(k), v), strict=True):
        expected = x.abs().amax(-1) / 127
        assert torch.equal(scales, expected)
        assert torch.equal(codes.float(), (x * (1 / expected)[:, None]).round())
        assert (codes.int().abs().amax(-1) == 127).all()


def test_tiny_keys_and_values_become_zeros() -> None:
    k, v = torch.full((2, 3, HEAD_DIM), 1e-33)
    k[1], v[1], k[2], v[2] = 0.0, -0.0, -1e-40, 5e-45
    cache = write(k, v)
    for codes, scales in stored(cache, 3):
        assert not codes.any()
        assert not scales.any()
    attention = CpuAttention(cache)
    plan = attention.plan(make_layout([(0, 3)], [[0]]), "self")
    assert torch.equal(
        attention.attend(0, torch.ones(3, 1, HEAD_DIM), plan, PLAIN), torch.zeros(3, 1, HEAD_DIM)
    )


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_become_nan(part: str, number: float) -> None:
    """The result is NaN for every query that attends to the token, and for no other sequence."""
    for block_size, head_dim in ((16, 64), (10, 13)):
        scene = Scene(Shape(3, 1, head_dim, block_size, torch.int8), [90, 70])
        scene.write_all()
        alone = scene.attend({1: (0, 70)}, PLAIN)[1]
        getattr(scene, part)[40, 0, head_dim - 1] = number
        scene.write_all()
        for start in (0, 60):
            together = scene.attend({0: (start, 90), 1: (0, 70)}, PLAIN)
            assert together[0][max(40 - start, 0) :].isnan().all()
            assert torch.equal(together[1], alone)
