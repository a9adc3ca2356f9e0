"""Tokens that a GPU's filters keep, by Triton's kernels and by their twin, against a reference model."""

import math
import random
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor

from tests.support import plain_sampling
from tests.support.cuda.interpreter import interpret, interpreted_modules
from tests.support.cuda.sampled_rows import INT32_MAX, POISON, bits
from tests.support.plain_sampling import Row, single
from tgis.shard.kernels.cuda.functions import filter_kernels, filters
from tgis.shard.kernels.cuda.step_state import Word

INF = math.inf
PEAKS = 32  # tokens per block of highest scores
Keep = Callable[[Tensor, Tensor], Tensor]
KINDS = {"normal": 3.0, "flat": 0.05, "ties": 2.0, "peaked": 12.0, "excluded": 3.0, "zeros": 1.0}


def write_kept(logits, words, highest, limits, kept, SIZE: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    sample, ids = tl.program_id(0), tl.arange(0, WIDTH)
    state, own = words + sample * filter_kernels.NUM_WORDS, limits + sample * filter_kernels.NUM_LIMITS
    scores = tl.load(logits + sample * SIZE + ids, mask=ids < SIZE, other=-INF)
    top = tl.load(highest + sample)
    result = filter_kernels.are_kept(scores, ids, top, state, own, SIZE)
    result &= filter_kernels.are_typical(scores, top, state, own)
    tl.store(kept + sample * SIZE + ids, result, mask=ids < SIZE)


def keep_plain(logits: Tensor, words: Tensor) -> Tensor:
    scores = logits.nan_to_num(0.0, 0.0, -INF)
    filters.filter_sorted(scores, logits.amax(-1), words)
    return scores > -INF


def keep_launched(module: ModuleType, logits: Tensor, words: Tensor) -> Tensor:
    num_rows, vocab_size = logits.shape
    padded = torch.nn.functional.pad(logits, (0, -vocab_size % PEAKS), value=-INF)
    highest = padded.view(num_rows, -1, PEAKS).amax(-1)
    with np.errstate(all="ignore"):
        limits = module.find_limits(logits, torch.arange(num_rows, dtype=torch.int32), words, highest)
        kept = torch.zeros(num_rows, vocab_size, dtype=torch.bool)
        width = 1 << (vocab_size - 1).bit_length()
        interpret(write_kept)[(num_rows,)](
            logits, words, logits.amax(-1), limits, kept, SIZE=vocab_size, WIDTH=width
        )
    return kept


@pytest.fixture(params=["plain", "launch"])
def keep(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Keep:
    if request.param == "plain":
        return keep_plain
    module = interpreted_modules()["sample"].filters
    monkeypatch.setattr(module, "BLOCK", 64)
    monkeypatch.setattr(module, "MAX_LISTED", 16)
    return lambda logits, words: keep_launched(module, logits, words)


def make_words(rows: Sequence[Row]) -> Tensor:
    words = torch.full((len(rows), len(Word)), POISON, dtype=torch.int32)
    for i, row in enumerate(rows):
        words[i, Word.ENDED], words[i, Word.GREEDY] = 0, int(row.greedy)
        words[i, Word.TOP_K] = min(row.top_k, INT32_MAX)
        for word in Word.TOP_P, Word.MIN_P, Word.TYPICAL_P:
            words[i, word] = bits(getattr(row, word.name.lower()))
    return words


def draw_logits(rng: random.Random, vocab_size: int, kind: str) -> list[float]:
    values = [single(rng.gauss(0, KINDS[kind])) for _ in range(vocab_size)]
    if kind == "ties":
        return [float(round(x)) for x in values]
    if kind == "zeros":
        return [rng.choice([0.0, -0.0, -0.5, 0.25]) for _ in values]
    if kind == "excluded":
        return [x if i == 0 or rng.random() < 0.4 else -INF for i, x in enumerate(values)]
    return values


def draw_row(rng: random.Random, vocab_size: int) -> Row:
    """Return a row with one filter in half of the cases, otherwise with any filters."""
    row = Row(draw_logits(rng, vocab_size, rng.choice(list(KINDS))), [1])
    asked = {
        "top_k": rng.choice([1, 2, 5, 20, vocab_size - 1, vocab_size, vocab_size + 1, 2**31 - 1]),
        "top_p": single(rng.choice([1e-6, 0.1, 0.5, 0.9, 0.999, rng.random()])),
        "min_p": single(rng.choice([1e-9, 0.02, 0.3])),
        "typical_p": single(rng.choice([1e-6, 0.05, 0.5, 0.95, rng.random()])),
    }
    chosen = rng.sample(list(asked), 1) if rng.random() < 0.5 else [x for x in asked if rng.random() < 0.6]
    for name in chosen:
        setattr(row, name, asked[name])
    return row


def check(keep: Keep, rows: Sequence[Row]) -> int:
    """Compare with the reference, unless rounding decides. Return the number of compared rows."""
    actual = keep(torch.tensor([row.logits for row in rows], dtype=torch.float32), make_words(rows))
    num_compared = 0
    for row, mask in zip(rows, actual.tolist(), strict=True):
        wanted = plain_sampling.process(row)
        if wanted.mass > 1e-6 and wanted.typical_order > 1e-5:
            num_compared += 1
            assert mask == [x > -INF for x in wanted.values], row
    return num_compared


@pytest.mark.parametrize(
    ("vocab_size", "count", "num_interpreted"),
    [(1, 20, 1), (2, 60, 1), (7, 300, 1), (40, 300, 2), (150, 200, 4)],
)
def test_equals_the_reference(keep: Keep, vocab_size: int, count: int, num_interpreted: int) -> None:
    rng = random.Random(vocab_size)
    count = count if keep is keep_plain else num_interpreted
    rows = [draw_row(rng, vocab_size) for _ in range(count)]
    assert check(keep, rows) >= max(1, count * 0.7 - 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_reference_for_many_rows(keep: Keep, seed: int) -> None:
    """Kernels with several sizes of lists and blocks; twins with more rows."""
    rng, vocab_size = random.Random(seed), [130, 257, 64, 300, 500, 700][seed]
    rows = [draw_row(rng, vocab_size) for _ in range(400 if keep is keep_plain else 15)]
    assert check(keep, rows) > len(rows) * 0.6


def test_top_p_keeps_the_lower_ids_of_equal_scores(keep: Keep) -> None:
    """All ties at the k-th score are kept and count for top-p. Ties may be in several blocks."""
    many = [1.0] * 150
    some = [0.0 if i % 3 else 5.0 for i in range(150)]  # 50 equal ones with almost all mass
    rows = [
        Row(many, [1], top_p=single(0.333)),  # 49.95 tokens
        Row(some, [1], top_k=7, top_p=single(0.29)),  # 14.5 of 50
        Row(some, [1], top_k=51),
        Row([2.0, *many[1:]], [1], top_p=1e-6),
    ]
    actual = keep(torch.tensor([row.logits for row in rows]), make_words(rows))
    assert [mask.nonzero().flatten().tolist() for mask in actual] == [
        list(range(50)),
        list(range(0, 45, 3)),
        list(range(150)),
        [0],
    ]


def test_unusable_rows_do_not_affect_others(keep: Keep) -> None:
    rng = random.Random(4)
    good = Row(draw_logits(rng, 70, "normal"), [1], top_k=9, top_p=single(0.8))
    bad = [[math.nan, *good.logits[1:]], [*good.logits[1:], INF], [-INF] * 70]
    rows = [good, *(Row(logits, [1], top_k=3, typical_p=0.5) for logits in bad), good]
    actual = keep(torch.tensor([row.logits for row in rows]), make_words(rows))
    wanted = [x > -INF for x in plain_sampling.process(good).values]
    assert [actual[0].tolist(), actual[-1].tolist()] == [wanted, wanted]


def test_masses_are_counted_to_the_last_bit() -> None:
    """Four thousand tokens of small mass, whose float32 sum would lose some."""
    logits = [0.0, *[single(math.log(1e-7))] * 4000]
    row = Row(logits, [1], top_p=single(0.9998))
    kept = int(keep_plain(torch.tensor([logits]), make_words([row])).sum())
    weight = math.exp(logits[1])
    assert kept == 1 + math.ceil((row.top_p * (1 + 4000 * weight) - 1) / weight)
