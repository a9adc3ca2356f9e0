"""Attention with bfloat16 arithmetic: against its definition in double precision with the same roundings, and
with the same bits with and without pairs, in every batch, for any block size and number of threads. AMX tiles
are those of the processor, or emulated."""

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.shard.attention_scene import PLAIN, SCORINGS, Scene, Shape
from tests.support.shard.emulated_tiles import compile_emulated
from tgis.shard.attention.interface import AttentionPlan, Scoring, StepLayout
from tgis.shard.kernels.cpu.amx import permission
from tgis.shard.kernels.cpu.attention.amx.products import DEPTH
from tgis.shard.kernels.cpu.attention.attention import CacheKernels, CpuAttention
from tgis.shard.kernels.cpu.attention.kernels import ATTEND, WRITE
from tgis.shard.kernels.cpu.bf16 import attention
from tgis.shard.kernels.cpu.bf16.attention import (
    PAIRS,
    ROUNDED,
    TILES,
    BfloatAttention,
    choose_attention,
)
from tgis.shard.kernels.cpu.gemm import pairs
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.memory.kv_cache import KVCache

BF16 = torch.bfloat16
KERNELS = {"rounded": ROUNDED, "pairs": PAIRS, "tiles": TILES}
EMULATED = "emulated tiles"
AGAIN = (
    *("amx.inner_loop", "attention.tiles", "attention.amx.products", "attention.amx.keys"),
    "attention.kernels",
)
SHAPES = {
    "plain": Shape(dtype=BF16),
    "multi_head": Shape(num_heads=3, num_kv_heads=3, head_dim=64, dtype=BF16),
    "narrow": Shape(num_heads=6, num_kv_heads=2, head_dim=24, dtype=BF16),
    "wide_heads": Shape(num_heads=5, num_kv_heads=1, head_dim=112, block_size=32, dtype=BF16),
    "many_heads_share": Shape(num_heads=40, num_kv_heads=2, head_dim=8, block_size=48, dtype=BF16),
    "long_blocks": Shape(head_dim=128, block_size=128, dtype=BF16),
}
LENGTHS = [1, 16, 65, 150, 33, 131]
WORK = {0: (0, 1), 1: (0, 16), 2: (64, 65), 3: (70, 149), 4: (0, 33), 5: (128, 131)}
SPAN = 64  # keys per update of the maximum


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=[*KERNELS, pytest.param(EMULATED, marks=pytest.mark.slow)])
def kernels(request: pytest.FixtureRequest) -> CacheKernels:
    if request.param == EMULATED and PAIRS is not None:
        return PAIRS._replace(attend=compile_emulated(AGAIN, "ATTEND_TILES"))
    kernels = KERNELS.get(request.param)
    if kernels is None or (kernels is TILES and permission.ask() is not None):
        pytest.skip("the processor has no such instructions, or the system does not permit them")
    return kernels


def uses_tiles(kernels: CacheKernels) -> bool:
    return kernels not in (PAIRS, ROUNDED)


def make_scene(kernels: CacheKernels, shape: Shape, lengths: list[int]) -> Scene:
    """Heads are widened to what tiles can multiply."""
    if uses_tiles(kernels):
        shape = shape._replace(head_dim=-(-shape.head_dim // DEPTH) * DEPTH)
    scene = Scene(shape, lengths)
    scene.attention = CpuAttention(scene.cache, kernels)
    scene.write_all()
    return scene


def attend_to_one_head(
    q: Tensor, k: Tensor, v: Tensor, bend: Tensor, sink: Tensor, scoring: Scoring
) -> Tensor:
    """Return the attention of one query, [head_dim], to keys and values [length, head_dim], rounded where the
    arithmetic rounds. `bend` is added to the scores; `sink` is the score of a key without a value."""
    scores = k.bfloat16().double() @ (q * scoring.scale).bfloat16().double()
    if scoring.soft_cap:
        scores = scoring.soft_cap * (scores / scoring.soft_cap).tanh()
    scores, total, weight_sum = scores + bend, torch.zeros(len(q), dtype=torch.double), 0.0
    maximum = torch.tensor(-1e30, dtype=torch.double)
    for begin in range(0, len(scores), SPAN):
        span = slice(begin, begin + SPAN)
        before, maximum = maximum, torch.maximum(maximum, scores[span].max())
        weights, growth = (scores[span] - maximum).exp().bfloat16().double(), (before - maximum).exp()
        total = total * growth + weights @ v[span].bfloat16().double()
        weight_sum = weight_sum * growth + weights.sum()
    return total / (weight_sum + (sink - maximum).exp())


def expect(scene: Scene, sequence: int, position: int, head: int, scoring: Scoring) -> Tensor:
    first, last = scene.rows(sequence, 0, scene.lengths[sequence]), position + 1
    kv_head = head * scene.shape.num_kv_heads // scene.shape.num_heads
    k, v = (x[first][:, kv_head] for x in (scene.k, scene.v))
    end = last if scoring.causal else WORK[sequence][1]
    distance = torch.arange(end) - position
    bend = torch.zeros(end, dtype=torch.double)
    if scoring.slopes is not None:
        bend += scoring.slopes[head].double() * distance
    if scoring.bias is not None:
        reach = scoring.bias.shape[1] // 2
        bend += scoring.bias[head, distance.clamp(-reach, reach) + reach].double()
    if scoring.window:
        bend[distance <= -scoring.window] = -torch.inf
    if scoring.chunk:
        bend[: position - position % scoring.chunk] = -torch.inf
    sink = torch.tensor(-torch.inf) if scoring.sinks is None else scoring.sinks[head]
    q = scene.q[first][position, head]
    return attend_to_one_head(q, k[:end], v[:end], bend, sink.double(), scoring)


def check(scene: Scene, scoring: Scoring) -> None:
    actual = scene.attend(WORK, scoring)
    differences = []
    for sequence, (start, end) in WORK.items():
        for position in {start, (start + end) // 2, end - 1}:
            for head in range(0, scene.shape.num_heads, 3):
                row = actual[sequence][position - start, head].double()
                differences.append(row - expect(scene, sequence, position, head, scoring))
    difference = torch.cat(differences).abs()
    # A weight halfway between two bfloat16 numbers may be rounded either way.
    assert difference.max() < 2e-3
    assert difference.mean() < 1e-4


@pytest.mark.skipif(PAIRS is None, reason="the processor does not multiply pairs")
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (96, 32), (128, 48), (24, 16)])
@pytest.mark.parametrize("start", [0, 5, 16, 40])
def test_tokens_are_written_the_same_alone_and_in_groups(head_dim: int, block_size: int, start: int) -> None:
    """Whole groups of tokens are transposed at once. Steps have other tokens before them."""
    assert PAIRS is not None
    end, num_heads = 240, 2
    k, v = torch.randn(2, end + 1, num_heads, head_dim)
    blocks = torch.randperm(end // block_size + 2, dtype=torch.int32)
    tables = torch.stack((blocks.roll(1), blocks))  # the other sequence has one token, in the last block
    caches = []
    for starts in ([start], range(start, end)):
        cache = KVCache(1, len(blocks), block_size, num_heads, head_dim, BF16)
        for pages in (*cache.keys, *cache.values):
            pages.zero_()
        attention = CpuAttention(cache, PAIRS)
        for first, last in zip(starts, [*starts[1:], end], strict=True):
            rows = [end, *range(first, last)]  # of k and v
            positions = torch.tensor([0, *range(first, last)])
            bounds = torch.tensor([0, 1, 1 + last - first], dtype=torch.int32)
            layout = StepLayout(bounds, positions, torch.tensor([1, last], dtype=torch.int32), tables)
            attention.keep(0, k[rows], v[rows], attention.plan(layout, "self"))
        caches.append(cache)
    one, other = caches
    assert torch.equal(one.keys[0], other.keys[0])
    assert torch.equal(one.values[0], other.values[0])
    keys, values = CpuAttention(one, PAIRS).read(0, blocks, end)
    assert torch.equal(keys[:, start:], k[start:end].transpose(0, 1).bfloat16().float())
    assert torch.equal(values[:, start:], v[start:end].transpose(0, 1).bfloat16().float())


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4])
@pytest.mark.parametrize("head_dim", [32, 96])
def test_tokens_have_the_same_bits_alone_and_in_chunks(
    kernels: CacheKernels, num_heads: int, head_dim: int
) -> None:
    """Few rows are not computed on tiles. Values after the last token are NaN."""
    length = 131
    cache = KVCache(1, 5, 32, 1, head_dim, BF16)
    cache.values[0].view(BF16).fill_(torch.nan)
    attention = CpuAttention(cache, kernels)
    q, (k, v) = torch.randn(length, num_heads, head_dim), torch.randn(2, length, 1, head_dim)
    table = torch.randperm(5, dtype=torch.int32).unsqueeze(0)

    def plan(start: int, end: int) -> AttentionPlan:
        bounds, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, end - start], [end]))
        return attention.plan(StepLayout(bounds, torch.arange(start, end), lengths, table), "self")

    for end in range(1, length + 1):
        attention.keep(0, k[end - 1 : end], v[end - 1 : end], plan(end - 1, end))
        for scoring in (Scoring(0.3), Scoring(0.3, window=50)):
            alone = attention.attend(0, q[end - 1 : end], plan(end - 1, end), scoring)
            start = max(0, end - 17)
            together = attention.attend(0, q[start:end], plan(start, end), scoring)
            assert alone.isfinite().all()
            assert torch.equal(alone[0], together[-1]), f"{end} tokens"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_the_definition(kernels: CacheKernels, shape: Shape) -> None:
    check(make_scene(kernels, shape, LENGTHS), PLAIN)


@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
def test_scoring_options(kernels: CacheKernels, scoring: dict) -> None:
    check(make_scene(kernels, SHAPES["plain"], LENGTHS), replace(PLAIN, **scoring))


@pytest.mark.skipif(PAIRS is None, reason="the processor does not multiply pairs")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("window", [None, 60])
def test_pairs_change_no_bit(shape: Shape, window: int | None) -> None:
    scoring = replace(PLAIN, window=window)
    one, other = (make_scene(each, shape, LENGTHS).attend(WORK, scoring) for each in (PAIRS, ROUNDED))
    assert all(torch.equal(one[sequence], other[sequence]) for sequence in WORK)


def test_bits_do_not_depend_on_batch_chunks_or_threads(kernels: CacheKernels) -> None:
    scene = make_scene(kernels, Shape(num_heads=9, num_kv_heads=3, dtype=BF16), [140, 77, 201])
    together = scene.attend({0: (0, 140), 1: (0, 77), 2: (0, 201)}, PLAIN)
    for threads, size in ((1, 1), (1, 5), (3, 64)):
        torch.set_num_threads(threads)
        scene.write_all()
        for sequence, length in enumerate(scene.lengths):
            spans = [(start, min(start + size, length)) for start in range(0, length, size)]
            chunks = [scene.attend({sequence: span}, PLAIN)[sequence] for span in spans]
            assert torch.equal(torch.cat(chunks), together[sequence])


def test_bits_do_not_depend_on_block_size_or_type_of_the_processor() -> None:
    make, results = BfloatAttention(), []
    for block_size in (8, 10, 16, 32, 80):
        scene = Scene(Shape(num_heads=8, block_size=block_size, dtype=BF16), [140, 77, 201])
        scene.attention = make(scene.cache)
        scene.write_all()
        actual = scene.attend({0: (20, 140), 1: (76, 77), 2: (200, 201)}, PLAIN)
        results.append(torch.cat(list(actual.values())))
    assert all(torch.equal(result, results[0]) for result in results)


def test_tokens_are_written_one_by_one_or_at_once(kernels: CacheKernels) -> None:
    """Two tokens may share pairs and be written by different threads or steps."""
    scene = make_scene(kernels, Shape(head_dim=40, dtype=BF16), [37, 50])
    whole, expected = scene.cache.keys.clone(), scene.cache.values.clone()
    for threads in (1, 3):
        scene.cache.keys.fill_(torch.nan)
        scene.cache.values.fill_(torch.nan)
        torch.set_num_threads(threads)
        for begin, end in ((0, 1), (1, 2), (2, 5), (5, 28), (28, 37)):
            rows = scene.rows(0, begin, end)
            scene.attention.keep(0, scene.k[rows], scene.v[rows], scene.plan([(begin, end)], [0]))
        rows = scene.rows(1, 0, 50)
        scene.attention.keep(0, scene.k[rows], scene.v[rows], scene.plan([(0, 50)], [1]))
        torch.testing.assert_close(scene.cache.keys, whole, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(scene.cache.values, expected, rtol=0, atol=0, equal_nan=True)
    for sequence, length in ((0, 37), (1, 50), (1, 17), (1, 0)):
        table = scene.layout([(0, 1), (0, 1)], [0, 1]).block_tables[sequence]
        for x, written in zip(scene.attention.read(0, table, length), (scene.k, scene.v), strict=True):
            rows = scene.rows(sequence, 0, length)
            assert torch.equal(x, written[rows].bfloat16().float().transpose(0, 1))


def test_writes_only_to_its_slots(kernels: CacheKernels) -> None:
    scene = make_scene(kernels, Shape(dtype=BF16), [40])
    scene.cache.values.fill_(torch.nan)
    scene.tables[0][1] = -1
    scene.attention.keep(0, scene.k[15:34], scene.v[15:34], scene.plan([(15, 34)], [0]))
    assert (~scene.cache.values.isnan()).sum() == 3 * scene.k[0].numel()


def test_nan_in_a_sequence_does_not_affect_others(kernels: CacheKernels) -> None:
    scene = make_scene(kernels, Shape(dtype=BF16), [50, 51])
    alone = scene.attend({1: (30, 51)}, PLAIN)[1]
    scene.v[:50], scene.k[3] = torch.nan, torch.inf
    scene.write_all()
    together = scene.attend({0: (30, 50), 1: (30, 51)}, PLAIN)
    assert torch.equal(together[1], alone)
    assert together[0].isnan().all()


def test_much_smaller_scores_of_other_spans_change_nothing(kernels: CacheKernels) -> None:
    scene = make_scene(kernels, Shape(num_heads=1, num_kv_heads=1, dtype=BF16), [200])
    scene.q[:, 0], scene.k[:] = 0.0, 0.0
    scene.q[:, 0, 0], scene.k[:64, 0, 0] = 4.0, 1024.0
    scene.write_all()
    mean = scene.v[:64, 0].bfloat16().double().mean(0)
    for row in scene.attend({0: (64, 200)}, PLAIN)[0][:, 0]:
        torch.testing.assert_close(row.double(), mean, rtol=0, atol=2**-8)


def test_rounds_as_torch_does(kernels: CacheKernels) -> None:
    scene = make_scene(kernels, Shape(1, 1, 16, 16, BF16), [16])
    edges = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 3.3961e38, 1e-30, 0.0, -3.3, 2**-126])
    odd_nans = torch.tensor([-1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    scene.k[0, 0, :16], scene.v[1, 0, :16] = (
        torch.cat((edges, -edges)),
        torch.cat((edges, edges[:6] * -0.9, odd_nans)),
    )
    scene.write_all()
    table = scene.layout([(0, 1)], [0]).block_tables[0]
    for x, written in zip(scene.attention.read(0, table, 16), (scene.k, scene.v), strict=True):
        expected = written.bfloat16().float().transpose(0, 1)
        torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(PAIRS is None, reason="the processor does not multiply pairs")
@pytest.mark.parametrize(("processor", "chosen"), [("znver4", PAIRS), ("sapphirerapids", ROUNDED)])
def test_pairs_are_multiplied_where_that_is_fast(
    processor: str,
    chosen: CacheKernels,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llvm, "processor_name", lambda: processor)
    assert choose_attention(multiplies_pairs=True) == BfloatAttention(chosen)
    assert choose_attention(multiplies_pairs=False, has_tiles=True) == BfloatAttention(ROUNDED)
    assert caplog.messages == []
    assert attention.is_near(ROUNDED)


def test_a_wrong_kernel_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that reads pairs of keys as single keys simulates a wrong instruction."""
    wrong = CacheKernels(ATTEND[BF16], PAIRS.write if PAIRS else WRITE[torch.float16])
    monkeypatch.setattr(attention, "PAIRS", wrong)
    monkeypatch.setattr(pairs, "are_fast", lambda: True)
    with caplog.at_level(logging.WARNING):
        assert choose_attention(multiplies_pairs=True) == BfloatAttention(ROUNDED, ("attend_pairs",))
    [line] = caplog.messages
    assert line.startswith("CPU kernel attend_pairs is replaced by rounding and float32 arithmetic")


@pytest.mark.skipif(TILES is None or permission.ask() is not None, reason="there is no AMX")
def test_tiles_are_used_unless_they_are_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_attention(multiplies_pairs=True, has_tiles=True) == BfloatAttention(TILES)
    wrong = CacheKernels(ATTEND[BF16], WRITE[torch.float16])
    monkeypatch.setattr(attention, "TILES", wrong)
    monkeypatch.setattr(pairs, "are_fast", lambda: False)
    with caplog.at_level(logging.WARNING):
        chosen = choose_attention(multiplies_pairs=True, has_tiles=True)
    assert chosen == BfloatAttention(ROUNDED, ("attend_tiles",))
    [line] = caplog.messages
    assert line.startswith("CPU kernel attend_tiles is replaced by one without AMX")


@pytest.mark.parametrize(("head_dim", "block_size"), [(80, 16), (64, 24)])
def test_tiles_need_whole_steps(head_dim: int, block_size: int) -> None:
    scene = Scene(Shape(head_dim=head_dim, block_size=block_size, dtype=BF16), LENGTHS)
    scene.attention = BfloatAttention(TILES)(scene.cache)
    scene.write_all()
    check(scene, PLAIN)


@pytest.mark.parametrize("factor", ["q", "k", "v"])
def test_two_bits_fewer_are_noticed(factor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check detects attention whose queries, keys or values have only 6 mantissa bits."""
    attend = attention._attend_plainly

    def attend_to_fewer_bits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        factors = {"q": q * scale, "k": k, "v": v}
        cut = factors[factor].view(torch.int32) & ~((1 << (23 - 6)) - 1)
        factors[factor] = cut.view(torch.float32)
        return attend(*factors.values(), 1.0)

    assert attention.is_near(ROUNDED)
    monkeypatch.setattr(attention, "_attend_plainly", attend_to_fewer_bits)
    assert not attention.is_near(ROUNDED)


def test_a_cache_of_another_type_is_attended_to_in_float32() -> None:
    scene = Scene(Shape(dtype=torch.float16), [40])
    actual = []
    for make in (CpuAttention, BfloatAttention()):
        scene.attention = make(scene.cache)
        scene.write_all()
        actual.append(scene.attend({0: (0, 40)}, PLAIN)[0])
    assert torch.equal(*actual)


@pytest.mark.slow
@pytest.mark.skipif(TILES is None or permission.ask() is not None, reason="there is no AMX")
@pytest.mark.parametrize("window", [None, 60])
def test_emulated_tiles_have_the_bits_of_the_processor_s(window: int | None) -> None:
    assert TILES is not None
    emulated = CacheKernels(compile_emulated(AGAIN, "ATTEND_TILES"), *TILES[1:])
    scoring, shape = replace(PLAIN, window=window), SHAPES["long_blocks"]
    one, other = (make_scene(each, shape, LENGTHS).attend(WORK, scoring) for each in (TILES, emulated))
    assert all(torch.equal(one[sequence], other[sequence]) for sequence in WORK)


@pytest.mark.parametrize("num_heads", [1, 4])
def test_tiny_sums_have_the_same_bits_alone_and_in_chunks(kernels: CacheKernels, num_heads: int) -> None:
    """AMX counts products below 2**-126 as zeros. The value of the key with the largest weight is zero."""
    length, head_dim = 40, 32
    cache = KVCache(1, 3, 16, 1, head_dim, BF16)
    attention = CpuAttention(cache, kernels)
    q, k = torch.ones(length, num_heads, head_dim), torch.zeros(length, 1, head_dim)
    k[0], v = 1.0, 2.0**-90 * torch.randn(length, 1, head_dim)
    v[0] = 0.0

    def plan(start: int) -> AttentionPlan:
        bounds, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, length - start], [length]))
        table = torch.arange(3, dtype=torch.int32).unsqueeze(0)
        return attention.plan(StepLayout(bounds, torch.arange(start, length), lengths, table), "self")

    attention.keep(0, k, v, plan(0))
    alone = attention.attend(0, q[-1:], plan(length - 1), Scoring(25 / head_dim))  # weights of e^-25
    together = attention.attend(0, q, plan(0), Scoring(25 / head_dim))
    assert torch.equal(alone[0], together[-1])
