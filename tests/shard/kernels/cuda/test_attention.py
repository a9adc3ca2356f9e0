"""Attention of GPUs, kernels in Triton's interpreter and their twins, against float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.cuda.attention import KERNELS, CudaScene
from tests.support.cuda.interpreter import interpreted, interpreted_modules
from tests.support.shard.attention_scene import FLOAT8_SHAPES, PLAIN, SCORINGS, SHAPES, Shape
from tgis.shard.attention.interface import Scoring
from tgis.shard.kernels.cuda import step_state
from tgis.shard.kernels.cuda.attend_segments import max_segments
from tgis.shard.kernels.cuda.attend_tiles import tile_tokens
from tgis.shard.kernels.cuda.attention import CudaPlan
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.step_state import count_segments

SEGMENT_LEN, MAX_SEGMENTS = 32, 4
MORE_SHAPES = {
    "sixteen_share": Shape(num_heads=16, num_kv_heads=1, head_dim=32, dtype=torch.bfloat16),
    "more_share_than_a_tile": Shape(num_heads=130, num_kv_heads=1, head_dim=16, dtype=torch.float16),
    "each_its_own": Shape(num_heads=3, num_kv_heads=3, head_dim=96, dtype=torch.bfloat16),
}
SLOW = {"more_share_than_a_tile", "e5m2", "e4m3_wide", "e4m3_odd_sizes"}
ALL_SHAPES = [
    pytest.param(shape, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
    for name, shape in (SHAPES | MORE_SHAPES | FLOAT8_SHAPES).items()
]
BENT = replace(PLAIN, **SCORINGS["all"])
SIX = {"slopes": torch.linspace(0.01, 0.3, 6), "bias": torch.linspace(-1, 1, 6 * 5).view(6, 5)}
BENT_OF_SIX = replace(BENT, **SIX, sinks=torch.linspace(-1, 2, 6))


# Covered by "all", "not_causal_bias" and the windows of test_lengths_around_segments.
COVERED = {
    "wide_window",
    "wide_chunk",
    "chunk_of_one",
    "soft_cap",
    "slopes",
    "window_and_sinks",
    "not_causal",
}


def list_scorings() -> list[object]:
    cases = [*((name, 16) for name in SCORINGS), ("all", 10)]
    return [pytest.param(*case, marks=[pytest.mark.slow] if case[0] in COVERED else []) for case in cases]


@pytest.fixture(params=KERNELS.values(), ids=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Implementations:
    return request.param()


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_state, "SEGMENT_LEN", SEGMENT_LEN)
    monkeypatch.setattr(step_state, "MAX_SEGMENTS", MAX_SEGMENTS)
    monkeypatch.setattr(interpreted_modules()["attend_segments"], "TOGETHER", 2)


@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_segments_of_all_shapes(kernels: Implementations, shape: Shape) -> None:
    scene = CudaScene(shape, [1, 70, 33], kernels)
    scene.check_last([(1, 70), (0, 1), (2, 33)], PLAIN)


@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_tiles_of_all_shapes(kernels: Implementations, shape: Shape) -> None:
    """Whole prompts, a single token, and chunks before and at the end of a block. With many heads, fewer
    tokens."""
    scene = CudaScene(shape, [40, 1, 130], kernels)
    max_tokens = 3 * tile_tokens(scene.group)
    scene.check_spans(
        [(0, 0, min(max_tokens, 40)), (1, 0, 1), (2, max(77, 130 - max_tokens), 130), (2, 62, 65)], PLAIN
    )


@pytest.mark.parametrize(("scoring", "block_size"), list_scorings())
def test_scoring(kernels: Implementations, scoring: str, block_size: int) -> None:
    scene = CudaScene(Shape(block_size=block_size), [150, 70, 20], kernels)
    asked = replace(PLAIN, **SCORINGS[scoring])
    if asked.bias is not None:  # not linear, because a softmax ignores constant offsets
        asked = replace(asked, bias=torch.randn_like(asked.bias))
    scene.check_last([(0, 150), (1, 70), (2, 20)], asked)
    scene.check_spans([(0, 81, 150), (1, 69, 70), (2, 0, 20)], asked)


def test_lengths_around_segments(kernels: Implementations) -> None:
    """Also lengths with longer segments, and idle rows at any place."""
    longest = SEGMENT_LEN * MAX_SEGMENTS
    lengths = [0, 1, SEGMENT_LEN - 1, SEGMENT_LEN, 0, 0, SEGMENT_LEN + 1]
    lengths += [longest, longest + 1, 2 * longest, 2 * longest + 1, 0]
    scene = CudaScene(Shape(num_heads=2, num_kv_heads=1), [max(1, length) for length in lengths], kernels)
    for window in (None, 1, SEGMENT_LEN, SEGMENT_LEN + 5, longest):
        scene.check_last(list(enumerate(lengths)), replace(PLAIN, window=window))
    for chunk in (SEGMENT_LEN, SEGMENT_LEN + 5):
        scene.check_last(list(enumerate(lengths)), replace(PLAIN, chunk=chunk))


def test_large_scores_are_finite(kernels: Implementations) -> None:
    scene, scoring = CudaScene(Shape(dtype=torch.bfloat16), [70], kernels), replace(PLAIN, scale=16.0)
    scene.check_last([(0, 70)], scoring)
    scene.check_spans([(0, 60, 70)], scoring)


def test_nothing_but_idle_rows(kernels: Implementations) -> None:
    scene = CudaScene(Shape(), [5, 9], kernels)
    scene.check_last([(0, 0), (1, 0)], PLAIN)


def test_partial_results_fit_their_memory() -> None:
    for max_seq_len in range(6 * SEGMENT_LEN * MAX_SEGMENTS):
        lengths = torch.arange(max_seq_len + 1, dtype=torch.int32)
        assert int(count_segments(lengths).max()) <= max_segments(max_seq_len)


def either(bent: Scoring) -> list[object]:
    return [pytest.param(PLAIN, marks=pytest.mark.slow, id="plain"), pytest.param(bent, id="bent")]


@pytest.mark.parametrize("scoring", either(BENT))
def test_bits_of_segments_depend_on_their_sequence_only(
    scoring: Scoring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, among others in any order, and for any number of programs."""
    scene = CudaScene(Shape(dtype=torch.bfloat16), [200, 33, 129, 64], KERNELS["kernel"]())
    work = list(enumerate(scene.lengths))
    alone = [scene.attend_last([item], scoring)[0] for item in work]
    for order, processors in (([3, 1, 0, 2], 1), ([2, 0, 3, 1], 7)):
        module = interpreted_modules()["attend_segments"]
        monkeypatch.setattr(module, "count_processors", lambda _, count=processors: count)
        some = [item for i in order for item in (work[i], (i, 0))]
        together = scene.attend_last(some, scoring)[::2]
        assert all(torch.equal(together[place], alone[i]) for place, i in enumerate(order))


@pytest.mark.parametrize("scoring", either(BENT_OF_SIX))
def test_bits_of_tiles_do_not_depend_on_chunks(scoring: Scoring) -> None:
    scene = CudaScene(Shape(num_heads=6, dtype=torch.float16), [140, 90], KERNELS["kernel"]())
    whole, _ = scene.attend_spans([(0, 0, 140), (1, 0, 90)], scoring)
    chunks = [(0, start, min(start + 33, 140)) for start in range(0, 140, 33)]
    assert torch.equal(torch.cat(scene.attend_spans(chunks[::-1], scoring)[::-1]), whole)


def test_hidden_keys_have_no_weight(kernels: Implementations) -> None:
    """Kernels do not read hidden keys. Twins multiply them by zero."""
    scene, scoring = CudaScene(Shape(), [100], kernels), replace(PLAIN, window=20)
    spans, filler = [(0, 60, 70)], 3e38 if kernels.replaced else torch.nan
    tile, single = scene.attend_spans(spans, scoring)[0], scene.attend_last([(0, 70)], scoring)
    for seen in (range(41, 70), range(50, 70)):
        hidden = [i for i in range(100) if i not in seen]
        scene.v[hidden], scene.k[hidden] = filler, filler
        scene.write_all()
        if seen[0] == 41:  # the first key of the token at 60
            assert torch.equal(scene.attend_spans(spans, scoring)[0], tile)
        assert torch.equal(scene.attend_last([(0, 70)], scoring), single)


def test_nan_in_a_sequence_does_not_affect_others(kernels: Implementations) -> None:
    scene = CudaScene(Shape(), [50, 50], kernels)
    work = [(0, 30, 50), (1, 30, 50)]
    tile, single = scene.attend_spans(work, PLAIN)[1], scene.attend_last([(0, 50), (1, 50)], PLAIN)[1]
    scene.v[:50] = torch.nan
    scene.k[3] = torch.inf
    scene.write_all()
    broken, intact = scene.attend_spans(work, PLAIN)
    assert torch.equal(intact, tile)
    assert broken.isnan().all()
    broken, intact = scene.attend_last([(0, 50), (1, 50)], PLAIN)
    assert torch.equal(intact, single)
    assert broken.isnan().all()


def test_queries_of_a_decoder_attend_to_the_whole_encoder(kernels: Implementations) -> None:
    """In cross-attention, tokens attend to more or fewer keys than their position implies."""
    scene, across = CudaScene(Shape(), [70, 20], kernels), replace(PLAIN, causal=False)
    q = torch.randn(9, 4, 16)
    # Row of the tables, first token, number of tokens, position, length of the encoder's sequence.
    tiles = torch.tensor([[1, 5, 4, 900, 20], [0, 2, 0, 5, 70], [0, 0, 3, 4, 70], [1, 3, 2, 0, 0]])
    out = torch.full_like(q, torch.nan)
    kernels.attend_tiles(q, *scene.where, tiles.int(), 70, across, out)
    for tokens, row, length in ((range(3), 0, 70), (range(5, 9), 1, 20)):
        for token in tokens:
            scene.q[scene.rows(row, length - 1, length)] = q[token]
            scene.check_near(out[token], scene.expected(row, length - 1, length, across)[0])
    assert not out[3:5].any(), "an encoder's sequence of length 0"


def test_tiles_write_their_tokens_only(kernels: Implementations) -> None:
    scene = CudaScene(Shape(), [60], kernels)
    q = torch.full((12, 4, 16), torch.nan)
    q[4:7] = scene.q[30:33]
    for tiles in ([[0, 4, 3, 30, 33], [0, 0, 0, 0, 0]], []):
        out = torch.full_like(q, 7.0)
        what = torch.tensor(tiles, dtype=torch.int32).view(-1, 5)
        kernels.attend_tiles(q, *scene.where, what, 33, PLAIN, out)
        assert (out[:4] == 7).all()
        assert (out[7:] == 7).all()
        if tiles:
            scene.check_near(out[4:7], scene.expected(0, 30, 33, PLAIN))


class RecordedKernel:
    """Kernel whose grids are recorded."""

    def __init__(self, kernel: Any):
        self._kernel = kernel
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return self._kernel[grid]


def test_more_tiles_than_a_grid_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's grid has at most 65,535 programs in its second dimension."""
    module = interpreted_modules()["attend_tiles"]
    recorded = RecordedKernel(module.attend_tiles_kernel)
    monkeypatch.setattr(module, "attend_tiles_kernel", recorded)
    scene = CudaScene(Shape(), [60, 40], interpreted())
    spans = [(0, 0, 60), (1, 0, 40)]
    expected = scene.attend_spans(spans, PLAIN)
    [(_, num_tiles, _)] = recorded.grids
    assert num_tiles == 2
    monkeypatch.setattr(module, "MAX_TILES", 1)
    assert all(map(torch.equal, scene.attend_spans(spans, PLAIN), expected))
    assert [grid[1] for grid in recorded.grids] == [2, 1, 1]


def test_a_step_of_single_tokens_and_chunks(kernels: Implementations) -> None:
    scene = CudaScene(Shape(), [70, 40, 50], kernels)
    single = scene.attention.plan(scene.layout([(69, 70), (39, 40)], [0, 1]), "self")
    tiles = torch.tensor([[2, 2, 20, 30, 50]], dtype=torch.int32)
    plan = CudaPlan(single.slot_mapping, scene.where[2], single.segments, tiles, 70)
    q = torch.cat((scene.q[69:70], scene.q[109:110], scene.q[140:160]))
    actual = scene.attention.attend(0, q, plan, PLAIN)
    for tokens, span in ((actual[:1], (0, 69, 70)), (actual[1:2], (1, 39, 40)), (actual[2:], (2, 30, 50))):
        scene.check_near(tokens, scene.expected(*span, PLAIN))
