"""The CPU's paged attention against a reference implementation, and bit by bit against itself."""

import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.support.shard.attention_scene import (
    ALL_SHAPES,
    PLAIN,
    SCORINGS,
    Scene,
    Shape,
    attend_some,
    check,
    round_stored,
)
from tests.support.shard.stepping import make_layout
from tgis.shard.attention.interface import Scoring
from tgis.shard.kernels.cpu.attention.plan import QUERY_TILE, CpuPlan
from tgis.shard.memory.kv_cache import KVCache, bytes_per_block

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
SLOPES, BIAS = torch.linspace(0.01, 0.3, 9), torch.linspace(-1, 1, 9 * 41).view(9, 41)
SINKS = torch.linspace(-1, 2, 9)
BENT = replace(PLAIN, window=90, soft_cap=3.0, slopes=SLOPES, bias=BIAS, sinks=SINKS)  # of nine heads


@pytest.mark.parametrize("shape", ALL_SHAPES.values(), ids=ALL_SHAPES)
def test_equals_the_reference(shape: Shape) -> None:
    """Single tokens, whole prompts and chunks in one step, with lengths around the edges of tiles and
    spans."""
    scene = Scene(shape, [1, 16, 65, 150, 33, 130])
    scene.write_all()
    work = {0: (0, 1), 1: (0, 16), 2: (64, 65), 3: (70, 150), 4: (0, 33), 5: (128, 130)}
    check(scene, work, PLAIN)


@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
@pytest.mark.parametrize("block_size", [16, 10])
def test_scoring_options(scoring: dict, block_size: int) -> None:
    scene = Scene(Shape(block_size=block_size), [150, 70, 20])
    scene.write_all()
    check(scene, {0: (90, 150), 1: (69, 70), 2: (0, 20)}, replace(PLAIN, **scoring))


@pytest.mark.parametrize("scoring", [PLAIN, replace(PLAIN, window=60)], ids=["plain", "window"])
@pytest.mark.parametrize("first_key", [1, 21])
def test_slots_before_the_first_key_are_not_read(scoring: Scoring, first_key: int) -> None:
    scene = Scene(Shape(), [150, 70, 40])
    scene.write_all()
    scoring = replace(scoring, first_key=first_key)
    check(scene, {0: (90, 150), 1: (69, 70), 2: (first_key, 40)}, scoring)
    out = scene.attend({2: (0, 40)}, scoring)[2]
    assert not out[:first_key].any()  # these tokens have no keys
    expected = scene.expected(2, first_key, 40, scoring)
    torch.testing.assert_close(out[first_key:].double(), expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", [PLAIN, BENT], ids=["plain", "bent"])
def test_bits_do_not_depend_on_batch_or_chunks(dtype: torch.dtype, scoring: Scoring) -> None:
    scene = Scene(Shape(num_heads=9, num_kv_heads=3, dtype=dtype), [140, 77, 200])
    scene.write_all()
    together = scene.attend({0: (0, 140), 1: (0, 77), 2: (0, 200)}, scoring)
    for sequence, length in enumerate(scene.lengths):
        for size in (1, 5, 64):
            starts = range(0, length, size)
            chunks = [scene.attend({sequence: (s, min(s + size, length))}, scoring)[sequence] for s in starts]
            assert torch.equal(torch.cat(chunks), together[sequence])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_block_size_or_threads(dtype: torch.dtype) -> None:
    """Pages of some sizes are read in place, with copies for many rows; other pages are gathered."""
    work = {0: (20, 140), 1: (76, 77), 2: (199, 200)}
    results = []
    for block_size in (8, 10, 16, 32, 64, 128):
        scene = Scene(Shape(num_heads=8, block_size=block_size, dtype=dtype), [140, 77, 200])
        scene.write_all()
        results.append(torch.cat(list(scene.attend(work, PLAIN).values())))
    torch.set_num_threads(3)
    try:
        scene.write_all()
        results.append(torch.cat(list(scene.attend(work, PLAIN).values())))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("shape", ALL_SHAPES.values(), ids=ALL_SHAPES)
def test_reads_written_keys_and_values(shape: Shape) -> None:
    scene = Scene(shape, [70, 50], num_layers=2)
    spans = [(0, 70), (0, 50)]
    layout = scene.layout(spans, [0, 1])
    scene.attention.keep(1, scene.k, scene.v, scene.attention.plan(layout, "self"))
    for sequence, length in ((0, 70), (1, 50), (1, 17), (0, 1), (0, 0)):
        actual = scene.attention.read(1, layout.block_tables[sequence], length)
        for x, written in zip(actual, (scene.k, scene.v), strict=True):
            rows = written[scene.rows(sequence, 0, length)]
            expected = round_stored(rows, shape.dtype, written is scene.k).float().transpose(0, 1)
            error = 1e-6 if (shape.dtype, written is scene.k) == (torch.int8, True) else 0  # of the rotation
            torch.testing.assert_close(x, expected, rtol=0, atol=error)
            assert x.dtype == torch.float32


def test_hidden_keys_have_no_weight() -> None:
    scene = Scene(Shape(), [100])
    scene.write_all()
    before = scene.attend({0: (0, 70)}, replace(PLAIN, window=20))[0]
    scene.v[:50], scene.v[80:] = 3e38, -3e38
    scene.write_all()
    after = scene.attend({0: (0, 100)}, replace(PLAIN, window=20))[0]
    assert torch.equal(after[69], before[69])
    assert torch.equal(scene.attend({0: (69, 90)}, replace(PLAIN, window=20))[0][0], before[69])


@pytest.mark.parametrize("drop", [80.0, 100.0, 1000.0])
@pytest.mark.parametrize("begin", [0, 64, 70])
def test_much_smaller_scores_of_other_spans_change_nothing(drop: float, begin: int) -> None:
    """A running maximum never decreases, however small the scores of a fully visible span are."""
    scene = Scene(Shape(num_heads=1, num_kv_heads=1), [256])
    scene.q[:, 0], scene.k[:] = 0.0, 0.0
    scene.q[:, 0, 0], scene.k[begin : begin + 30, 0, 0] = 1 / PLAIN.scale, drop
    scene.write_all()
    check(scene, {0: (100, 256)}, PLAIN)


def test_writes_only_to_its_slots() -> None:
    scene = Scene(Shape(), [40], num_layers=2)
    scene.tables[0][1] = -1
    scene.attention.keep(1, scene.k, scene.v, scene.plan([(0, 40)], [0]))
    assert scene.cache.keys[0].isnan().all()
    written = (~scene.cache.values[1].isnan()).sum()
    assert written == 24 * scene.k[0].numel()


def test_nan_in_a_sequence_does_not_affect_others() -> None:
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


def test_size_of_a_block() -> None:
    class Model(NamedTuple):
        num_cache_layers: int
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
    assert bytes_per_block(Model(1, 1, 64), Ranks(1), 16, torch.int8) == 2 * 16 * (64 + 4)
    assert bytes_per_block(Model(1, 1, 13), Ranks(1), 10, torch.int8) == 2 * (132 + 4 * 10)  # aligned scales


def test_a_plan_is_copied() -> None:
    """Arguments prepared for one step serve another step with the same number of tokens after its plan is
    copied."""
    scene = Scene(Shape(num_heads=6), [150, 40, 90])
    scene.write_all()
    first = scene.plan([(69, 70), (9, 10)], [0, 1])
    second = scene.plan([(89, 90), (149, 150)], [2, 0])
    q = torch.cat([scene.q[scene.rows(2, 89, 90)], scene.q[scene.rows(0, 149, 150)]])
    expected = scene.attention.attend(0, q, second, PLAIN)
    second.copy_into(first)
    del second
    assert torch.equal(scene.attention.attend(0, q, first, PLAIN), expected)


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [2, 0, 1], [0, 0, 1], [33, 1, 100, 32]])
def test_every_token_is_in_one_tile(counts: list[int]) -> None:
    lengths = [count + 7 * i for i, count in enumerate(counts)]
    spans = [(length - count, length) for length, count in zip(lengths, counts, strict=True)]
    plan = CpuPlan(make_layout(spans, [list(range(20))] * len(counts)), 10, is_cross=False)
    tiles = [item[:4] for item in plan.items.tolist()]
    placed = [
        (begin + i, sequence, position + i)
        for sequence, begin, count, position in tiles
        for i in range(count)
    ]
    expected = [(sequence, position) for sequence, span in enumerate(spans) for position in range(*span)]
    assert sorted(placed) == [(token, *place) for token, place in enumerate(expected)]
    costs = [count * (position + count) for _, _, count, position in tiles]
    assert costs == sorted(costs, reverse=True)
    assert max(count for _, _, count, _ in tiles) <= plan.table[4] <= QUERY_TILE


def test_bits_are_the_same_for_any_number_of_heads_that_share() -> None:
    """Tiles then have other heights."""
    results = []
    for num_heads in (1, 2, 3, 4, 5, 7, 17):
        scene = Scene(Shape(num_heads=17, num_kv_heads=1, head_dim=80), [100, 70])
        scene.write_all()
        scene.q = scene.q[:, :num_heads].contiguous()
        actual = scene.attend({0: (10, 100), 1: (69, 70)}, PLAIN)
        results.append(torch.cat([actual[0][:, 0], actual[1][:, 0]]))
    assert all(torch.equal(result, results[0]) for result in results)


_OTHER_PROCESSOR = """
import sys, torch
from tests.support.shard.attention_scene import attend_some
torch.save(attend_some(), sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a processor of another kind")
def test_bits_are_the_same_with_shorter_registers(tmp_path: Path) -> None:
    target = {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+sse4.2",
    }
    command = [sys.executable, "-c", _OTHER_PROCESSOR, str(tmp_path / "result")]
    subprocess.run(command, env={**os.environ, **target}, check=True)
    assert torch.equal(torch.load(tmp_path / "result"), attend_some())
