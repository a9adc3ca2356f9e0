"""The CPU's paged attention against a plain model of the rules, and bit by bit against itself."""

import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.shard.stepping import make_metadata
from tgis.shard.attention.interface import TILE, AttentionMetadata, Scoring
from tgis.shard.kernels.cpu.attention.attention import CpuAttention
from tgis.shard.memory.kv_cache import KVCache, bytes_per_block

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PLAIN = Scoring(scale=0.3)


class Shape(NamedTuple):
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32


class Scene:
    """Sequences of random queries, keys and values in a cache whose other slots hold NaN."""

    def __init__(self, shape: Shape, lengths: list[int], num_layers: int = 1):
        torch.manual_seed(0)
        self.shape, self.lengths = shape, lengths
        total = sum(lengths)
        self.q = torch.randn(total, shape.num_heads, shape.head_dim)
        self.k, self.v = torch.randn(2, total, shape.num_kv_heads, shape.head_dim)
        per_sequence = -(-max(lengths) // shape.block_size)
        num_blocks = per_sequence * len(lengths) + 1
        self.tables = torch.randperm(num_blocks)[:-1].view(len(lengths), per_sequence).tolist()
        sizes = (num_layers, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.cache = KVCache(*sizes, shape.dtype)
        self.cache.keys.fill_(torch.nan)
        self.cache.values.fill_(torch.nan)
        self.attention = CpuAttention(self.cache)

    def metadata(self, spans: list[tuple[int, int]], sequences: list[int]) -> AttentionMetadata:
        return make_metadata(spans, [self.tables[i] for i in sequences], self.shape.block_size)

    def rows(self, sequence: int, start: int, end: int) -> slice:
        begin = sum(self.lengths[:sequence])
        return slice(begin + start, begin + end)

    def write_all(self) -> None:
        spans = [(0, length) for length in self.lengths]
        self.attention.write(0, self.k, self.v, self.metadata(spans, list(range(len(spans)))))

    def attend(self, work: dict[int, tuple[int, int]], scoring: Scoring) -> dict[int, Tensor]:
        """sequence -> [start, end) of its positions; the cache is taken to end there."""
        rows = [self.rows(i, *span) for i, span in work.items()]
        q = torch.cat([self.q[r] for r in rows])
        out = self.attention.attend(0, q, self.metadata(list(work.values()), list(work)), scoring)
        return dict(zip(work, out.split([end - start for start, end in work.values()]), strict=True))

    def expected(self, sequence: int, start: int, end: int, scoring: Scoring) -> Tensor:
        rows = self.rows(sequence, 0, end)
        group = self.shape.num_heads // self.shape.num_kv_heads
        k, v = (x[rows].to(self.shape.dtype).double().repeat_interleave(group, 1) for x in (self.k, self.v))
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
        if scoring.window:
            hidden |= distance <= -scoring.window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
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


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_agrees_with_the_rules(shape: Shape) -> None:
    """Decode rows, whole prompts and chunks in one call; lengths around the edges of tiles and spans."""
    scene = Scene(shape, [1, 16, 65, 150, 33, 130])
    scene.write_all()
    work = {0: (0, 1), 1: (0, 16), 2: (64, 65), 3: (70, 150), 4: (0, 33), 5: (128, 130)}
    check(scene, work, PLAIN)


SCORINGS = {
    "window": {"window": 7},
    "wide_window": {"window": 100},
    "window_of_one": {"window": 1},
    "soft_cap": {"soft_cap": 2.0},
    "slopes": {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "bias": {"bias": torch.linspace(-2, 2, 4 * 41).view(4, 41)},
    "not_causal": {"causal": False},
    "not_causal_bias": {"causal": False, "bias": torch.linspace(2, -2, 4 * 11).view(4, 11)},
    "all": {
        "window": 80,
        "soft_cap": 5.0,
        "slopes": torch.tensor([0.02, 0.01, 0.3, 0.1]),
        "bias": torch.linspace(-1, 1, 4 * 5).view(4, 5),
    },
}


@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
@pytest.mark.parametrize("block_size", [16, 10])
def test_scores_are_bent_as_asked(scoring: dict, block_size: int) -> None:
    scene = Scene(Shape(block_size=block_size), [150, 70, 20])
    scene.write_all()
    check(scene, {0: (90, 150), 1: (69, 70), 2: (0, 20)}, replace(PLAIN, **scoring))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", [PLAIN, replace(PLAIN, window=90, soft_cap=3.0)], ids=["plain", "bent"])
def test_bits_do_not_depend_on_company_or_chunks(dtype: torch.dtype, scoring: Scoring) -> None:
    scene = Scene(Shape(num_heads=9, num_kv_heads=3, dtype=dtype), [140, 77, 200])
    scene.write_all()
    together = scene.attend({0: (0, 140), 1: (0, 77), 2: (0, 200)}, scoring)
    for sequence, length in enumerate(scene.lengths):
        for size in (1, 5, 64):
            starts = range(0, length, size)
            chunks = [scene.attend({sequence: (s, min(s + size, length))}, scoring)[sequence] for s in starts]
            assert torch.equal(torch.cat(chunks), together[sequence])


def test_bits_do_not_depend_on_block_size_or_threads() -> None:
    work = {0: (20, 140), 1: (76, 77), 2: (199, 200)}
    results = []
    for block_size in (8, 10, 16, 32, 64, 128):
        scene = Scene(Shape(num_heads=8, block_size=block_size), [140, 77, 200])
        scene.write_all()
        results.append(torch.cat(list(scene.attend(work, PLAIN).values())))
    torch.set_num_threads(3)
    try:
        scene.write_all()
        results.append(torch.cat(list(scene.attend(work, PLAIN).values())))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_reads_what_was_written(shape: Shape) -> None:
    scene = Scene(shape, [70, 50], num_layers=2)
    spans = [(0, 70), (0, 50)]
    metadata = scene.metadata(spans, [0, 1])
    scene.attention.write(1, scene.k, scene.v, metadata)
    for sequence, length in ((0, 70), (1, 50), (1, 17), (0, 1), (0, 0)):
        found = scene.attention.read(1, metadata.block_tables[sequence], length)
        for x, written in zip(found, (scene.k, scene.v), strict=True):
            expected = written[scene.rows(sequence, 0, length)].to(shape.dtype).float().transpose(0, 1)
            assert torch.equal(x, expected)
            assert x.dtype == torch.float32


def test_what_is_hidden_has_no_weight_at_all() -> None:
    scene = Scene(Shape(), [100])
    scene.write_all()
    before = scene.attend({0: (0, 70)}, replace(PLAIN, window=20))[0]
    scene.v[:50], scene.v[80:] = 3e38, -3e38
    scene.write_all()
    after = scene.attend({0: (0, 100)}, replace(PLAIN, window=20))[0]
    assert torch.equal(after[69], before[69])
    assert torch.equal(scene.attend({0: (69, 90)}, replace(PLAIN, window=20))[0][0], before[69])


def test_writes_only_where_it_is_told() -> None:
    scene = Scene(Shape(), [40], num_layers=2)
    metadata = scene.metadata([(0, 40)], [0])
    slots = metadata.slot_mapping.clone()
    slots[::2] = -1
    scene.attention.write(1, scene.k, scene.v, replace(metadata, slot_mapping=slots.to(torch.int32)))
    assert scene.cache.keys[0].isnan().all()
    written = (~scene.cache.values[1].isnan()).sum()
    assert written == 20 * scene.k[0].numel()


def test_a_broken_sequence_harms_no_other() -> None:
    scene = Scene(Shape(), [50, 50])
    scene.write_all()
    alone = scene.attend({1: (30, 50)}, PLAIN)[1]
    scene.v[:50] = torch.nan
    scene.k[3] = torch.inf
    scene.write_all()
    together = scene.attend({0: (30, 50), 1: (30, 50)}, PLAIN)
    assert torch.equal(together[1], alone)
    assert together[0].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounds_as_torch_does(dtype: torch.dtype) -> None:
    scene = Scene(Shape(head_dim=64, dtype=dtype), [16])
    edges = torch.tensor(
        [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, 3e38]
    )
    scene.v.view(-1)[: 3 * len(edges)] = torch.cat((edges, -edges, edges * 1e-7))
    odd_nan = torch.tensor([-1], dtype=torch.int32).view(torch.float32)
    scene.v.view(-1)[-4:] = torch.cat((torch.tensor([torch.inf, -torch.inf, torch.nan]), odd_nan))
    scene.write_all()
    block = scene.tables[0][0]
    held = scene.cache.values[0, block].view(2, 16, 64)  # [num_kv_heads, block_size, head_dim]
    expected = scene.v.to(dtype).transpose(0, 1)
    torch.testing.assert_close(held, expected, rtol=0, atol=0, equal_nan=True)


def test_one_block_takes_what_is_said() -> None:
    class Model(NamedTuple):
        num_layers: int
        num_kv_heads: int
        head_dim: int

    class Ranks(NamedTuple):
        size: int

    cache = KVCache(3, 5, 16, 2, 64, torch.bfloat16)
    assert (
        bytes_per_block(Model(3, 4, 64), Ranks(2), 16, torch.bfloat16) * 5
        == cache.keys.nbytes + cache.values.nbytes
    )
    assert bytes_per_block(Model(3, 4, 64), Ranks(2), 16, torch.bfloat16) == 2 * 3 * 2 * 16 * 64 * 2
    assert bytes_per_block(Model(1, 1, 64), Ranks(4), 16, torch.float32) == 2 * 16 * 64 * 4


def test_a_step_is_read_from_its_table() -> None:
    """What was prepared for one step serves another of as many tokens, once that one's table is copied."""
    scene = Scene(Shape(num_heads=6), [150, 40, 90])
    scene.write_all()
    first = scene.metadata([(69, 70), (9, 10)], [0, 1])
    second = scene.metadata([(89, 90), (149, 150)], [2, 0])
    q = torch.cat([scene.q[scene.rows(2, 89, 90)], scene.q[scene.rows(0, 149, 150)]])
    expected = scene.attention.attend(0, q, second, PLAIN)
    first.table.copy_(second.table)
    assert torch.equal(scene.attention.attend(0, q, first, PLAIN), expected)


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [2, 0, 1], [0, 0, 1], [33, 1, 100, 32]])
def test_every_token_stands_in_one_tile(counts: list[int]) -> None:
    lengths = [count + 7 * i for i, count in enumerate(counts)]
    spans = [(length - count, length) for length, count in zip(lengths, counts, strict=True)]
    metadata = make_metadata(spans, [list(range(20))] * len(counts), 10)
    tiles = metadata.tiles.tolist()
    placed = [
        (begin + i, sequence, position + i)
        for sequence, begin, count, position in tiles
        for i in range(count)
    ]
    expected = [(sequence, position) for sequence, span in enumerate(spans) for position in range(*span)]
    assert sorted(placed) == [(token, *place) for token, place in enumerate(expected)]
    costs = [count * (position + count) for _, _, count, position in tiles]
    assert costs == sorted(costs, reverse=True)
    assert max(count for _, _, count, _ in tiles) <= metadata.table[4] <= TILE


def test_bits_are_the_same_for_any_number_of_heads_that_share() -> None:
    """Rows are taken in tiles of other heights then."""
    results = []
    for num_heads in (1, 2, 3, 4, 5, 7, 17):
        scene = Scene(Shape(num_heads=17, num_kv_heads=1, head_dim=80), [100, 70])
        scene.write_all()
        scene.q = scene.q[:, :num_heads].contiguous()
        found = scene.attend({0: (10, 100), 1: (69, 70)}, PLAIN)
        results.append(torch.cat([found[0][:, 0], found[1][:, 0]]))
    assert all(torch.equal(result, results[0]) for result in results)


_OTHER_PROCESSOR = """
import sys, torch
from tests.shard.kernels.cpu.test_attention import attend_some
torch.save(attend_some(), sys.argv[1])
"""


def attend_some() -> Tensor:
    scene = Scene(Shape(num_heads=9, num_kv_heads=3, head_dim=64, dtype=torch.float16), [100, 40])
    scene.write_all()
    work = {0: (20, 100), 1: (39, 40)}
    check(scene, work, PLAIN)
    return torch.cat(list(scene.attend(work, PLAIN).values()))


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a processor of another kind")
def test_bits_are_the_same_with_shorter_registers(tmp_path: Path) -> None:
    target = {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+sse4.2",
    }
    command = [sys.executable, "-c", _OTHER_PROCESSOR, str(tmp_path / "found")]
    subprocess.run(command, env={**os.environ, **target}, check=True, timeout=120)
    assert torch.equal(torch.load(tmp_path / "found"), attend_some())
