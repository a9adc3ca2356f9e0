"""Random sequences in a cache, and their attention computed in float64 from its definition."""

from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.shard.stepping import make_layout
from tgis.shard.attention.interface import Attention, AttentionPlan, Scoring, StepLayout
from tgis.shard.kernels.cpu.attention.attention import CpuAttention
from tgis.shard.memory.kv_cache import UNSCALED, CacheScale, KVCache

PLAIN = Scoring(scale=0.3)


def rotate(x: Tensor) -> Tensor:
    """Multiply vectors, [any, head_dim], by Hadamard matrices, as large as they divide head_dim."""
    size = next(size for size in (256, 128, 64, 32, 16, 8, 4, 2, 1) if x.shape[-1] % size == 0)
    for distance in (each for each in (1, 2, 4, 8, 16, 32, 64, 128) if each < size):
        at = torch.arange(x.shape[-1])
        signs = torch.where(at & distance > 0, -1, 1).to(x.dtype)
        x = x[..., at ^ distance] + x * signs
    return x


def round_stored(x: Tensor, dtype: torch.dtype, are_keys: bool) -> Tensor:
    """Return keys or values, [any, head_dim] float32, as a cache of this type stores them, in float64.
    Integers have a scale for each vector, and keys are rotated before."""
    if dtype.is_floating_point:
        return x.to(dtype).double()
    y = rotate(x) if are_keys else x
    scales = y.abs().amax(-1, keepdim=True) / 127
    y = (y * (1 / scales)).round().double() * scales.double()
    return rotate(y) / int(rotate(torch.ones(x.shape[-1])).amax()) if are_keys else y


class Shape(NamedTuple):
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32


class Scene:
    """Sequences of random queries, keys and values in a cache whose other slots contain NaN."""

    def __init__(self, shape: Shape, lengths: list[int], num_layers: int = 1, scale: CacheScale = UNSCALED):
        torch.manual_seed(0)
        self.shape, self.lengths = shape, lengths
        total = sum(lengths)
        self.q = torch.randn(total, shape.num_heads, shape.head_dim)
        self.k, self.v = torch.randn(2, total, shape.num_kv_heads, shape.head_dim)
        per_sequence = -(-max(lengths) // shape.block_size)
        num_blocks = per_sequence * len(lengths) + 1
        self.tables = torch.randperm(num_blocks)[:-1].view(len(lengths), per_sequence).tolist()
        sizes = (num_layers, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.cache = KVCache(*sizes, shape.dtype, scales=[scale] * num_layers)
        for pages in (self.cache.keys, self.cache.values):
            # Of integers, the scales become NaN.
            (pages if shape.dtype.is_floating_point else pages.view(torch.float32)).fill_(torch.nan)
        self.attention: Attention = CpuAttention(self.cache)

    def layout(self, spans: list[tuple[int, int]], sequences: list[int]) -> StepLayout:
        return make_layout(spans, [self.tables[i] for i in sequences])

    def plan(self, spans: list[tuple[int, int]], sequences: list[int]) -> AttentionPlan:
        return self.attention.plan(self.layout(spans, sequences), "self")

    def rows(self, sequence: int, start: int, end: int) -> slice:
        begin = sum(self.lengths[:sequence])
        return slice(begin + start, begin + end)

    def write_all(self) -> None:
        spans = [(0, length) for length in self.lengths]
        self.attention.keep(0, self.k, self.v, self.plan(spans, list(range(len(spans)))))

    def attend(self, work: dict[int, tuple[int, int]], scoring: Scoring) -> dict[int, Tensor]:
        """Attend with positions [start, end) of each sequence, for a cache that ends there."""
        rows = [self.rows(i, *span) for i, span in work.items()]
        q = torch.cat([self.q[r] for r in rows])
        out = self.attention.attend(0, q, self.plan(list(work.values()), list(work)), scoring)
        return dict(zip(work, out.split([end - start for start, end in work.values()]), strict=True))

    def expected(self, sequence: int, start: int, end: int, scoring: Scoring) -> Tensor:
        rows = self.rows(sequence, 0, end)
        group = self.shape.num_heads // self.shape.num_kv_heads
        dtype = self.shape.dtype
        scaled = zip((self.k, self.v), self.cache.scales[0], strict=True)
        k, v = (
            (round_stored(x[rows] / scale, dtype, x is self.k) * scale).repeat_interleave(group, 1)
            for x, scale in scaled
        )
        q = self.q[self.rows(sequence, start, end)].double()
        scores = torch.einsum("qhd,khd->hqk", q, k) * scoring.scale
        distance = torch.arange(end)[None, :] - torch.arange(start, end)[:, None]
        if scoring.soft_cap:
            scores = scoring.soft_cap * (scores / scoring.soft_cap).tanh()
        if scoring.slopes is not None:
            scores = scores + scoring.slopes[:, None, None].double() * distance
        if scoring.bias is not None:
            reach = scoring.bias.shape[1] // 2
            scores = scores + scoring.bias[:, distance.clamp(-reach, reach) + reach].double()
        hidden = (distance > 0) & scoring.causal
        hidden |= torch.arange(end) < scoring.first_key
        if scoring.window:
            hidden |= distance <= -scoring.window
        if scoring.chunk:
            hidden |= (
                torch.arange(end)[None, :] // scoring.chunk
                != torch.arange(start, end)[:, None] // scoring.chunk
            )
        scores = scores.masked_fill(hidden, -torch.inf)
        if scoring.sinks is not None:  # one more key, whose value is zero
            sinks = scoring.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            scores, v = torch.cat((scores, sinks), -1), torch.cat((v, torch.zeros_like(v[:1])))
        weights = scores.softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)


def check(scene: Scene, work: dict[int, tuple[int, int]], scoring: Scoring) -> None:
    for sequence, out in scene.attend(work, scoring).items():
        expected = scene.expected(sequence, *work[sequence], scoring)
        torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=1e-5)


SHAPES = {
    "plain": Shape(),
    "float16": Shape(dtype=torch.float16),
    "bfloat16": Shape(dtype=torch.bfloat16),
    "multi_head": Shape(num_heads=3, num_kv_heads=3, head_dim=64),
    "one_kv_head": Shape(num_heads=7, num_kv_heads=1, head_dim=24, block_size=8),
    "many_heads_share": Shape(num_heads=40, num_kv_heads=2, head_dim=8, dtype=torch.float16),
    "odd_sizes": Shape(num_heads=6, num_kv_heads=2, head_dim=13, block_size=10, dtype=torch.bfloat16),
    "small_blocks": Shape(head_dim=80, block_size=4),
    "wide_heads": Shape(num_heads=5, num_kv_heads=1, head_dim=112, block_size=32, dtype=torch.float16),
    "single_slots": Shape(block_size=1),
    "long_blocks": Shape(head_dim=128, block_size=128),
}
FLOAT8_SHAPES = {
    "e4m3": Shape(dtype=torch.float8_e4m3fn),
    "e5m2": Shape(num_heads=6, num_kv_heads=2, head_dim=64, dtype=torch.float8_e5m2),
    "e4m3_wide": Shape(num_heads=5, num_kv_heads=1, head_dim=128, block_size=32, dtype=torch.float8_e4m3fn),
    "e4m3_odd_sizes": Shape(
        num_heads=6, num_kv_heads=2, head_dim=13, block_size=10, dtype=torch.float8_e4m3fn
    ),
    "e5m2_odd_sizes": Shape(num_heads=3, num_kv_heads=3, head_dim=24, block_size=8, dtype=torch.float8_e5m2),
}
INT8_SHAPES = {
    "int8": Shape(num_heads=3, num_kv_heads=1, head_dim=64, dtype=torch.int8),
    "int8_wide": Shape(num_heads=5, num_kv_heads=1, head_dim=128, block_size=32, dtype=torch.int8),
    "int8_odd_sizes": Shape(num_heads=6, num_kv_heads=2, head_dim=13, block_size=10, dtype=torch.int8),
    "int8_odd_heads": Shape(num_heads=6, num_kv_heads=2, head_dim=13, dtype=torch.int8),
}
ALL_SHAPES = SHAPES | FLOAT8_SHAPES | INT8_SHAPES


SCORINGS = {
    "window": {"window": 7},
    "wide_window": {"window": 100},
    "window_of_one": {"window": 1},
    "chunk": {"chunk": 7},
    "wide_chunk": {"chunk": 48, "soft_cap": 5.0},
    "chunk_of_one": {"chunk": 1},
    "soft_cap": {"soft_cap": 2.0},
    "slopes": {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "bias": {"bias": torch.linspace(-2, 2, 4 * 41).view(4, 41)},
    "sinks": {"sinks": torch.tensor([3.0, -3.0, 100.0, -100.0])},
    "window_and_sinks": {"window": 7, "sinks": torch.tensor([0.5, 1.0, -1.0, 0.0])},
    "not_causal": {"causal": False},
    "not_causal_bias": {"causal": False, "bias": torch.linspace(2, -2, 4 * 11).view(4, 11)},
    "all": {
        "window": 80,
        "soft_cap": 5.0,
        "slopes": torch.tensor([0.02, 0.01, 0.3, 0.1]),
        "bias": torch.linspace(-1, 1, 4 * 5).view(4, 5),
        "sinks": torch.tensor([1.0, 2.0, -1.0, 0.0]),
    },
}


def attend_some() -> Tensor:
    results = []
    for dtype in (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        scene = Scene(Shape(num_heads=9, num_kv_heads=3, head_dim=64, dtype=dtype), [100, 40])
        scene.write_all()
        work = {0: (20, 100), 1: (39, 40)}
        check(scene, work, PLAIN)
        results += scene.attend(work, PLAIN).values()
    return torch.cat(results)
