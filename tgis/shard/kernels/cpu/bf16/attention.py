"""Attention with bfloat16 arithmetic: queries, keys, values and softmax weights are rounded to bfloat16, and
sums are float32. A sum has the same order, and so the same bits, with pairs and without."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tgis.shard.attention.interface import Scoring, StepLayout
from tgis.shard.kernels.cpu.attention.amx.products import DEPTH
from tgis.shard.kernels.cpu.attention.attention import CacheKernels, CpuAttention
from tgis.shard.kernels.cpu.attention.kernels import ATTEND_TILES, WRITE, attend_kernel
from tgis.shard.kernels.cpu.attention.pair_pages import WRITE_PAIRS
from tgis.shard.kernels.cpu.gemm import pairs
from tgis.shard.kernels.cpu.jit.vectors import LANES
from tgis.shard.kernels.cpu.replaced import warn_of_rounding, warn_without_amx
from tgis.shard.memory.kv_cache import KVCache

REPLACED, REPLACED_TILES = "attend_pairs", "attend_tiles"  # names of kernels that may be replaced
_U16 = np.uint16(0)  # stands for bits of bfloat16, and for float32 values rounded to bfloat16
_PAIR = np.uint32(0)
# Sizes and tolerance of the self-check. The error comes from rounded softmax weights.
_HEADS = 3
_HEAD_DIM = 32
_LENGTH = 75
_TOLERANCE = 2**-8

ROUNDED = CacheKernels(attend_kernel(_U16, _U16), WRITE[torch.bfloat16])
"""Kernels for all processors, which round and compute in float32."""

PAIRS = (
    None
    if WRITE_PAIRS is None
    else CacheKernels(attend_kernel(_PAIR, _PAIR, pairs.COLUMNS), WRITE_PAIRS, pairs.COLUMNS)
)
"""None if the processor does not multiply pairs."""

TILES = (
    None
    if WRITE_PAIRS is None or ATTEND_TILES is None
    else CacheKernels(ATTEND_TILES, WRITE_PAIRS, pairs.COLUMNS)
)
"""None if the processor has no AMX."""


@dataclass(frozen=True)
class BfloatAttention:
    """Factory of attention for a cache. Caches of other types than bfloat16 get float32 arithmetic."""

    kernels: CacheKernels | None = PAIRS
    replaced: tuple[str, ...] = ()
    """Names of kernels that failed the self-check."""

    def __call__(self, cache: KVCache) -> CpuAttention:
        if cache.dtype != torch.bfloat16:
            return CpuAttention(cache)
        step = DEPTH if self.kernels is TILES else pairs.COLUMNS
        has_whole_steps = cache.head_dim % step == 0 and cache.block_size % LANES == 0
        return CpuAttention(cache, self.kernels if self.kernels and has_whole_steps else ROUNDED)


def choose_attention(multiplies_pairs: bool, has_tiles: bool = False) -> BfloatAttention:
    """Return the fastest correct attention on this processor. `multiplies_pairs` is False if matrix products
    failed their self-check, `has_tiles` is True if AMX may be used."""
    replaced = []
    if TILES is not None and has_tiles and multiplies_pairs:
        if is_near(TILES):
            return BfloatAttention(TILES)
        warn_without_amx(REPLACED_TILES, "AMX_BF16")
        replaced.append(REPLACED_TILES)
    if PAIRS is not None and multiplies_pairs and pairs.are_fast():
        if is_near(PAIRS):
            return BfloatAttention(PAIRS, tuple(replaced))
        warn_of_rounding(REPLACED)
        replaced.append(REPLACED)
    return BfloatAttention(ROUNDED, tuple(replaced))


def is_near(kernels: CacheKernels) -> bool:
    """Return True if attention to random keys and values, for a prompt and for its last token alone, is close
    to float64 results."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, _LENGTH, _HEADS, _HEAD_DIM, generator=generator)
    num_blocks = -(-_LENGTH // LANES)
    scale = _HEAD_DIM**-0.5
    attention = CpuAttention(KVCache(1, num_blocks, LANES, _HEADS, _HEAD_DIM, torch.bfloat16), kernels)
    attention.keep(0, k, v, attention.plan(_lay_out(0, num_blocks), "self"))
    expected = _attend_plainly(q, k, v, scale)
    differences = [
        attention.attend(0, q[start:], attention.plan(_lay_out(start, num_blocks), "self"), Scoring(scale))
        - expected[start:]
        for start in (0, _LENGTH - 1)
    ]
    return all(bool((difference.abs() <= _TOLERANCE).all()) for difference in differences)


def _lay_out(start: int, num_blocks: int) -> StepLayout:
    """Return the step of one sequence whose new tokens begin at `start`."""
    return StepLayout(
        cu_seqlens_q=torch.tensor([0, _LENGTH - start], dtype=torch.int32),
        positions=torch.arange(start, _LENGTH),
        seq_lens=torch.tensor([_LENGTH], dtype=torch.int32),
        block_tables=torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0),
    )


def _attend_plainly(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return causal attention, [length, heads, head_dim], in float64 with operands rounded to bfloat16."""
    q, k, v = (x.bfloat16().double() for x in (q * scale, k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k)
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
