"""Attention in segments of keys: against float64, and with the same bits whether segments are one unit of
work or several."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.shard.attention_scene import ALL_SHAPES, PLAIN, SCORINGS, Scene, Shape, check
from tests.support.shard.stepping import make_layout
from tgis.shard.attention.interface import Scoring
from tgis.shard.kernels.cpu.attention import plan as plans
from tgis.shard.kernels.cpu.jit.compiler import capture
from tgis.shard.kernels.cpu.kernel_graph import KernelGraph, MemoryPool

SHORT_SEGMENT = 64
WINDOWED = replace(PLAIN, window=150, soft_cap=3.0)


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "SEGMENT_LEN", SHORT_SEGMENT)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def attend_whole(scene: Scene, scoring: Scoring) -> list[Tensor]:
    """Return the results of whole prompts, whose tiles process their segments one after the other."""
    return list(scene.attend({i: (0, n) for i, n in enumerate(scene.lengths)}, scoring).values())


def test_equals_the_definition_around_the_ends_of_segments() -> None:
    length = plans.SEGMENT_LEN
    scene = Scene(Shape(num_heads=3, num_kv_heads=1), [length - 1, length, length + 1, 2 * length + 1, 2500])
    scene.write_all()
    check(scene, {i: (n - 1, n) for i, n in enumerate(scene.lengths)}, PLAIN)
    check(scene, {1: (length - 20, length), 2: (length - 20, length + 1), 3: (2040, 2049)}, PLAIN)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("shape", ALL_SHAPES.values(), ids=ALL_SHAPES)
def test_equals_the_definition(shape: Shape) -> None:
    scene = Scene(shape, [63, 64, 65, 129, 300, 256])
    scene.write_all()
    check(scene, {i: (n - 1, n) for i, n in enumerate(scene.lengths)}, PLAIN)
    check(scene, {0: (0, 63), 2: (60, 65), 3: (64, 129), 4: (190, 300), 5: (250, 256)}, PLAIN)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
def test_scoring_options(scoring: dict) -> None:
    scene = Scene(Shape(), [330, 65, 200])
    scene.write_all()
    changed = replace(PLAIN, **scoring)
    check(scene, {0: (329, 330), 1: (64, 65), 2: (192, 200)}, changed)
    check(scene, {0: (230, 330), 1: (0, 65), 2: (191, 200)}, changed)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("scoring", [PLAIN, WINDOWED], ids=["plain", "windowed"])
def test_bits_do_not_depend_on_units_of_work(scoring: Scoring, threads: int) -> None:
    """Chunks of up to eight tokens have one unit of work per segment, longer ones do not."""
    scene = Scene(Shape(num_heads=9, num_kv_heads=3, dtype=torch.float16), [330, 128, 65])
    scene.write_all()
    together = attend_whole(scene, scoring)
    for sequence, length in enumerate(scene.lengths):
        for size in (1, 7, 8, 9, 100):
            starts = range(0, length, size)
            chunks = [scene.attend({sequence: (s, min(s + size, length))}, scoring)[sequence] for s in starts]
            assert torch.equal(torch.cat(chunks), together[sequence])
    ends = scene.attend({2: (64, 65), 0: (322, 330), 1: (127, 128)}, scoring)
    assert all(torch.equal(ends[i], together[i][-len(ends[i]) :]) for i in ends)


@pytest.mark.usefixtures("short_segments")
def test_segments_are_merged_whichever_thread_ends_last() -> None:
    scene = Scene(Shape(num_heads=6, num_kv_heads=1, head_dim=64, dtype=torch.float16), [2000, 700])
    scene.write_all()
    work = {0: (1999, 2000), 1: (692, 700)}
    expected = scene.attend(work, PLAIN)
    torch.set_num_threads(5)
    try:
        for _ in range(200):
            actual = scene.attend(work, PLAIN)
            assert all(torch.equal(actual[i], expected[i]) for i in work)
    finally:
        torch.set_num_threads(1)


def test_one_segment_has_the_bits_of_a_single_softmax(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    length = plans.SEGMENT_LEN
    scene = Scene(Shape(), [length + 100])
    scene.write_all()
    segmented = attend_whole(scene, PLAIN)[0]
    monkeypatch.setattr(plans, "SEGMENT_LEN", 4 * length)
    single = attend_whole(scene, PLAIN)[0]
    assert torch.equal(segmented[:length], single[:length])
    assert not torch.equal(segmented[length:], single[length:])


@pytest.mark.usefixtures("short_segments")
def test_keys_outside_the_window_have_no_weight() -> None:
    scene = Scene(Shape(), [300])
    scene.write_all()
    scoring = replace(PLAIN, window=80)
    before = scene.attend({0: (269, 270)}, scoring)[0][0]
    scene.k[:190], scene.v[:190] = torch.nan, torch.nan
    scene.write_all()
    for start in (0, 269):
        actual = scene.attend({0: (start, 270)}, replace(scoring, window=78))[0][-1]
        assert not actual.isnan().any()
    scene.v[:190], scene.k[:190] = 3e38, 0.0
    scene.write_all()
    assert torch.equal(scene.attend({0: (269, 270)}, scoring)[0][0], before)


@pytest.mark.usefixtures("short_segments")
def test_nan_in_a_sequence_does_not_affect_others() -> None:
    scene = Scene(Shape(), [200, 200])
    scene.write_all()
    alone = scene.attend({1: (199, 200)}, PLAIN)[1]
    scene.v[70], scene.k[3] = torch.nan, torch.inf
    scene.write_all()
    together = scene.attend({0: (199, 200), 1: (199, 200)}, PLAIN)
    assert torch.equal(together[1], alone)
    assert together[0].isnan().all()
    assert scene.attend({0: (100, 200)}, PLAIN)[0].isnan().all()


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("length", [0, 1, 64, 65, 200])
def test_cross_attention_reads_all_of_the_encoder(length: int) -> None:
    """Short tiles have one unit per segment; long tiles process one segment after the other."""
    scene = Scene(Shape(), [200])
    scene.write_all()
    q = torch.randn(40, 4, 16)
    actual = []
    for count in (1, 40):
        layout = scene.layout([(0, count)], [0])
        layout = replace(layout, seq_lens=torch.tensor([length], dtype=torch.int32))
        plan = scene.attention.plan(layout, "cross")
        actual.append(scene.attention.attend(0, q[:count], plan, replace(PLAIN, causal=False)))
    k, v = (x[:length].double().repeat_interleave(2, 1) for x in (scene.k, scene.v))
    weights = (torch.einsum("qhd,khd->hqk", q.double(), k) * PLAIN.scale).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, v)
    torch.testing.assert_close(actual[1].double(), expected, rtol=2e-5, atol=1e-5)
    assert torch.equal(actual[0], actual[1][:1])


@pytest.mark.usefixtures("short_segments")
def test_a_captured_step_follows_sequences_into_new_segments(threads: int) -> None:
    scene = Scene(Shape(num_heads=6), [400, 400])
    scene.write_all()
    whole = attend_whole(scene, PLAIN)
    fixed_q, fixed_plan = torch.empty(2, 6, 16), scene.plan([(9, 10), (8, 9)], [0, 1])
    with capture(MemoryPool().empty) as launches:
        out = scene.attention.attend(0, fixed_q, fixed_plan, PLAIN)
    graph = KernelGraph(launches)
    for first, second in ((10, 9), (63, 200), (64, 64), (65, 399), (300, 130), (127, 64), (20, 30)):
        ends = first + 1, second + 1
        scene.plan([(first, ends[0]), (second, ends[1])], [0, 1]).copy_into(fixed_plan)
        fixed_q.copy_(torch.stack([scene.q[first], scene.q[400 + second]]))
        for _ in range(2):  # layers share the memory of partial results
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, torch.stack([whole[0][first], whole[1][second]]))


@pytest.mark.parametrize("is_cross", [False, True])
def test_a_plan_has_every_segment_of_a_short_tile_once(is_cross: bool) -> None:
    """The test counts segments one by one. The most expensive items come first."""
    length = plans.SEGMENT_LEN
    lengths, counts = [3 * length + 5, length, 2 * length, length + 1], [1, 8, 40, 3]
    spans = [(n - count, n) for n, count in zip(lengths, counts, strict=True)]
    table = list(range(-(-max(lengths) // 16)))
    plan = plans.CpuPlan(make_layout(spans, [table] * 4), 16, is_cross)
    items = plan.items.tolist()
    actual = sorted((sequence, count, parts, segment) for sequence, _, count, _, parts, segment, _ in items)
    expected = [(0, 1, 4, segment) for segment in range(4)] + [(1, 8, 1, 0), (2, 8, 2, 0), (2, 8, 2, 1)]
    assert actual == sorted([*expected, (2, 32, 1, 0), (3, 3, 2, 0), (3, 3, 2, 1)])
    places = [
        first + segment * count + token
        for _, _, count, _, parts, segment, first in items
        for token in range(count if parts > 1 else 0)
    ]
    assert sorted(places) == list(range(4 * 1 + 2 * 8 + 2 * 3)), "partial results do not overlap"
    assert items[0][2] == 32


@pytest.mark.usefixtures("short_segments")
def test_tiles_of_large_batches_are_not_split() -> None:
    """The bits equal those of a single sequence, whose tiles are split."""
    scene = Scene(Shape(), [70] * 20 + [700])
    scene.write_all()
    work = {i: (n - 1, n) for i, n in enumerate(scene.lengths)}
    together = scene.attend(work, PLAIN)
    plan = scene.plan(list(work.values()), list(work))
    num_parts = {sequence: parts for sequence, _, _, _, parts, _, _ in plan.items.tolist()}
    assert num_parts == dict.fromkeys(range(20), 1) | {20: 11}
    for sequence, span in work.items():
        alone = scene.attend({sequence: span}, PLAIN)[sequence]
        assert scene.plan([span], [sequence]).items[0, 4] > 1
        assert torch.equal(alone, together[sequence])
