"""Paged attention on the CPU, in float32 by default, whatever the type of the cache. Kernels read pages in
place.

The result of a row has the same bits in every batch, for every number of threads and block size, and for
every split of its sequence into chunks."""

from typing import NamedTuple

import torch
from torch import Tensor

from tgis.shard.attention.interface import AttentionKind, AttentionPlan, Heads, Scoring, StepLayout
from tgis.shard.kernels.cpu.attention.elements.float8 import READ_FACTORS
from tgis.shard.kernels.cpu.attention.kernels import ATTEND, TOKENS, WRITE
from tgis.shard.kernels.cpu.attention.plan import CpuPlan
from tgis.shard.kernels.cpu.attention.segments import EXTRA
from tgis.shard.kernels.cpu.jit import compiler
from tgis.shard.kernels.cpu.jit.compiler import Kernel, as_bits
from tgis.shard.kernels.cpu.jit.vectors import LANES
from tgis.shard.kernels.cpu.ops import split_heads
from tgis.shard.memory.kv_cache import SCALE_BYTES, KVCache


class CacheKernels(NamedTuple):
    """Kernels for one type and layout of a cache's pages."""

    attend: Kernel
    write: Kernel
    columns: int = 1  # numbers in an element of the cache


class CpuAttention:
    def __init__(self, cache: KVCache, kernels: CacheKernels | None = None):
        """Attend in float32, or with `kernels`."""
        kernels = kernels or CacheKernels(ATTEND[cache.dtype], WRITE[cache.dtype])
        self._cache, self._attend, self._write, self._columns = cache, *kernels
        width = cache.dtype.itemsize * self._columns
        sizes = (cache.num_kv_heads, cache.head_dim, cache.block_size, width)
        layers = zip(cache.keys, cache.values, strict=True)
        self._result_size = -(-cache.head_dim // LANES) * LANES + EXTRA
        # For each layer, the fields of the kernels' `Pages`.
        self._pages = [(k.data_ptr(), v.data_ptr(), *sizes) for k, v in layers]
        # For each layer, the factors of `Pages` as bits.
        read = READ_FACTORS.get(cache.dtype, 1.0)
        self._reading = [(as_bits(each.key * read), as_bits(each.value * read)) for each in cache.scales]
        self._writing = [(as_bits(1 / each.key), as_bits(1 / each.value)) for each in cache.scales]
        # For each layer, its last `Scoring` and the fields of the kernel's `ScoringArgs`.
        self._scoring_args: list[tuple[Scoring | None, tuple[int, ...]]] = [(None, ())] * cache.num_layers

    def plan(self, layout: StepLayout, kind: AttentionKind) -> CpuPlan:
        return CpuPlan(layout, self._cache.block_size, is_cross=kind == "cross")

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
        assert isinstance(plan, CpuPlan)
        k, v = k.contiguous(), v.contiguous()
        run = self._write if len(k) <= TOKENS else self._write.parallel
        addresses = (plan.table.data_ptr(), k.data_ptr(), v.data_ptr())
        run(*self._pages[layer], *addresses, *self._writing[layer])

    def attend(self, layer: int, q: Tensor, plan: AttentionPlan, scoring: Scoring) -> Tensor:
        assert isinstance(plan, CpuPlan)
        q, out = q.contiguous(), compiler.empty(*q.shape)
        plan.reserve_partials(q.shape[1] * self._result_size)
        known, fields = self._scoring_args[layer]
        if known is not scoring:
            fields = _scoring_fields(scoring)
            self._scoring_args[layer] = (scoring, fields)
        addresses = (plan.table.data_ptr(), q.data_ptr(), out.data_ptr())
        factors = self._reading[layer]
        num_threads = torch.get_num_threads()
        self._attend.parallel(*self._pages[layer], q.shape[1], *addresses, *fields, *factors, num_threads)
        return out

    def read(self, layer: int, block_table: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        cache = self._cache
        blocks = block_table[: -(-seq_len // cache.block_size)].long()
        keys, values = cache.keys[layer][blocks], cache.values[layer][blocks]
        k = self._pages_of(keys, cache.head_dim, cache.block_size).transpose(2, 3).float()
        v = self._pages_of(values, cache.block_size, cache.head_dim).float()
        if cache.dtype == torch.int8:
            k, v = _rotate_back(k * self._scales_of(keys)), v * self._scales_of(values)
        k, v = (x.transpose(0, 1).flatten(1, 2)[:, :seq_len] for x in (k, v))
        return k * cache.scales[layer].key, v * cache.scales[layer].value

    def _pages_of(self, memory: Tensor, height: int, width: int) -> Tensor:
        """View the memory of blocks as pages [num_blocks, num_kv_heads, height, width]."""
        columns = self._columns
        elements = memory[..., : height * width].contiguous()
        elements = elements.view(*memory.shape[:2], height // columns, width, columns)
        return elements.flip(-1).transpose(3, 4).flatten(2, 3)

    def _scales_of(self, memory: Tensor) -> Tensor:
        """Return the scales of the tokens of blocks, [num_blocks, num_kv_heads, block_size, 1]."""
        return (
            memory[..., -SCALE_BYTES * self._cache.block_size :].contiguous().view(torch.float32)[..., None]
        )


def _rotate_back(k: Tensor) -> Tensor:
    """Undo the rotation of keys, [any, head_dim] (see `elements/rotation.py`)."""
    size = k.shape[-1] & -k.shape[-1]
    x = k.reshape(-1, size)
    half = 1
    while half < size:
        pairs = x.view(-1, size // (2 * half), 2, half)
        x = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), 2).view(-1, size)
        half *= 2
    return (x / size).view(k.shape)


def _scoring_fields(scoring: Scoring) -> tuple[int, ...]:
    """Return the fields of the kernel's `ScoringArgs`."""
    slopes, bias = scoring.slopes, scoring.bias
    return (
        as_bits(scoring.scale),
        as_bits(scoring.soft_cap or 0.0),
        -scoring.chunk if scoring.chunk else scoring.window or 0,
        int(scoring.causal),
        0 if slopes is None else slopes.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if bias is None else bias.shape[1],
        0 if scoring.sinks is None else scoring.sinks.data_ptr(),
        scoring.first_key,
    )
