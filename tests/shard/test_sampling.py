"""Sampling against a plain model of its rules that works on one row, as lists of Python floats."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from tgis.shard.details import describe
from tgis.shard.sampling import PARAMETERS, SamplingBatch, SeenTokens, sample

INF = math.inf
CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As many as it takes to split the sum over a row that is alone."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


@dataclass
class Row:
    logits: list[float]
    token_ids: list[int]
    num_generated: int = 0
    eos: list[int] = field(default_factory=list)
    greedy: bool = False
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    length_penalty_start: int = 0
    length_penalty_factor: float = 1.0


def run(rows: list[Row], described: bool = True) -> tuple[list[int], torch.Tensor, list[bool]]:
    """The batched code: tokens, scores after all processors, usable."""
    params = np.array([tuple(getattr(row, name) for name in PARAMETERS.names) for row in rows], PARAMETERS)
    eos = np.full((len(rows), max(1, *(len(row.eos) for row in rows), 1)), -1, np.int32)
    scores = torch.tensor([row.logits for row in rows], dtype=torch.float32)
    seen = SeenTokens(scores.shape[-1], CPU)
    for i, row in enumerate(rows):
        eos[i, : len(row.eos)] = row.eos
        seen.start(i, np.array(row.token_ids, np.int32))
    batch = SamplingBatch(
        rows=np.arange(len(rows)),
        params=params,
        num_generated=np.array([row.num_generated for row in rows]),
        positions=np.array([len(row.token_ids) for row in rows]),
        eos_token_ids=eos,
        described=np.full(len(rows), described),
    )
    tokens, usable = sample(scores, batch, seen)
    return tokens.tolist(), scores, usable.tolist()


def single(x: float) -> float:
    """Rounded to what the batched code can hold, so that ties are the same ones."""
    return float(np.float32(x))


def expected_scores(row: Row) -> tuple[list[float], bool]:
    """Scores after all processors, and whether the answer hangs on the last bits of a sum."""
    scores = [float(x) for x in row.logits]
    eos = {i for i in row.eos if 0 <= i < len(scores)}
    if row.num_generated < row.min_new_tokens:
        scores = [-INF if i in eos else x for i, x in enumerate(scores)]
    elif row.num_generated > row.length_penalty_start:
        growth = row.length_penalty_factor ** (row.num_generated - row.length_penalty_start) - 1
        scores = [single(x + abs(x) * growth) if i in eos else x for i, x in enumerate(scores)]
    p = row.repetition_penalty
    seen = set(row.token_ids)
    scores = [single(x * p if x < 0 else x / p) if i in seen else x for i, x in enumerate(scores)]
    if row.greedy:
        return scores, False
    scores = [single(x / row.temperature) for x in scores]
    if row.top_k:
        edge = sorted(scores, reverse=True)[min(row.top_k, len(scores)) - 1]
        scores = [x if x >= edge else -INF for x in scores]
    scores, close = limit_mass(scores, row.top_p)
    if row.typical_p < 1:
        scores, also = limit_typical(scores, row.typical_p)
        close = close or also
    return scores, close


def softmax(scores: list[float]) -> list[float]:
    highest = max(scores)
    weights = [math.exp(x - highest) for x in scores]
    total = math.fsum(weights)
    return [w / total for w in weights]


def limit_mass(scores: list[float], top_p: float) -> tuple[list[float], bool]:
    if top_p >= 1:
        return scores, False
    probabilities = softmax(scores)
    rising = sorted(range(len(scores)), key=lambda i: (scores[i], -i))
    total, dropped, close = 0.0, set(), False
    for i in rising[:-1]:
        total += probabilities[i]
        close = close or abs(total - (1 - top_p)) < 1e-5
        if total <= 1 - top_p:
            dropped.add(i)
    return [-INF if i in dropped else x for i, x in enumerate(scores)], close


def limit_typical(scores: list[float], mass: float) -> tuple[list[float], bool]:
    probabilities = softmax(scores)
    entropy = -math.fsum(p * math.log(p) for p in probabilities if p > 0)
    distance = [abs(-math.log(p) - entropy) if p > 0 else INF for p in probabilities]
    order = sorted(range(len(scores)), key=lambda i: distance[i])
    total, edge, close = 0.0, INF, False
    for i in order:
        total += probabilities[i]
        close = close or abs(total - mass) < 1e-5
        if total >= mass:
            edge = distance[i]
            break
    # Two tokens at almost the same distance on either side of the entropy may change places.
    close = close or any(0 < abs(d - edge) < 1e-4 for d in distance)
    return [x if d <= edge else -INF for x, d in zip(scores, distance, strict=True)], close


def random_row(rng: random.Random, vocab_size: int) -> Row:
    kind = rng.choice(["normal", "flat", "ties", "peaked"])
    spread = {"normal": 3.0, "flat": 0.01, "ties": 2.0, "peaked": 12.0}[kind]
    logits = [rng.gauss(0, spread) for _ in range(vocab_size)]
    if kind == "ties":
        logits = [float(round(x)) for x in logits]
    token_ids = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 40))]
    row = Row(np.float32(logits).tolist(), token_ids, num_generated=rng.randint(0, min(20, len(token_ids))))
    row.eos = rng.sample(range(vocab_size), rng.randint(0, 3)) + rng.choice([[], [vocab_size + 5]])
    row.greedy, row.seed = rng.random() < 0.2, rng.getrandbits(64)
    row.repetition_penalty = rng.choice([1.0, 1.0, 0.5, 1.25, 4.0])
    row.min_new_tokens = rng.choice([0, 0, 5, 12])
    row.length_penalty_start = rng.choice([0, 3, 10])
    row.length_penalty_factor = rng.choice([1.0, 1.0, 1.5])
    if not row.greedy:
        row.temperature = rng.choice([1.0, 1.0, 0.5, 2.0])
        row.top_k = rng.choice(
            [0, 0, 1, 2, 5, 63, 64, 65, vocab_size - 1, vocab_size, vocab_size + 1, 2**31 - 1]
        )
        row.top_p = float(np.float32(rng.choice([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.999])))
        row.typical_p = float(np.float32(rng.choice([1.0, 1.0, 1.0, 0.05, 0.5, 0.95])))
    return row


@pytest.mark.parametrize(("vocab_size", "batches"), [(3, 150), (40, 150), (300, 60), (2500, 10), (20_000, 2)])
def test_agrees_with_the_rules(vocab_size: int, batches: int) -> None:
    rng = random.Random(vocab_size)
    checked = 0
    for _ in range(batches):
        rows = [random_row(rng, vocab_size) for _ in range(rng.randint(1, 24))]
        tokens, scores, usable = run(rows)
        for row, token, got, fit in zip(rows, tokens, scores.tolist(), usable, strict=True):
            wanted, close = expected_scores(row)
            assert fit == (max(wanted) > -INF), row
            if close or not fit:
                continue
            checked += 1
            assert [x == -INF for x in got] == [x == -INF for x in wanted], row
            assert np.allclose(got, wanted, rtol=2e-5, atol=1e-6)
            assert got[token] > -INF
            if row.greedy:
                assert token == got.index(max(got))
    assert checked > batches * 5


@pytest.mark.usefixtures("two_threads")
def test_a_row_is_the_same_alone_and_in_a_crowd() -> None:
    rng = random.Random(5)
    for vocab_size in (700, 50_000):
        rows = [random_row(rng, vocab_size) for _ in range(12)]
        rows = [row for row in rows if expected_usable(row)]
        tokens, scores, _ = run(rows)
        for i, row in enumerate(rows):
            (alone,), score, _ = run([row])
            assert alone == tokens[i]
            assert torch.equal(score[0], scores[i])
            n = np.array([4])
            one = describe(score, torch.tensor([alone]), n)
            many = describe(scores, torch.tensor(tokens), np.repeat(n, len(rows)))
            assert one.logprobs[0] == many.logprobs[i]


def expected_usable(row: Row) -> bool:
    return row.num_generated >= row.min_new_tokens or len(set(row.eos)) < len(row.logits)


def test_the_draw_hangs_on_seed_and_position() -> None:
    logits = [0.0] * 100
    places = run([Row(logits, [1] * length, seed=9) for length in range(1, 30)])[0]
    assert len(set(places)) > 20
    counts = run([Row(logits, [1] * 30, num_generated=count, seed=9) for count in range(20)])[0]
    assert set(counts) == {run([Row(logits, [2] * 30, seed=9)])[0][0]}
    assert len(set(run([Row(logits, [1], seed=seed) for seed in range(30)])[0])) > 20


def test_the_choice_does_not_hang_on_who_asks_for_details() -> None:
    rng = random.Random(6)
    rows = [random_row(rng, 200) for _ in range(50)]
    assert run(rows, described=True)[0] == run(rows, described=False)[0]


def test_filters_that_leave_everything_change_nothing() -> None:
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(1)).tolist()
    for seed in range(20):
        plain = run([Row(logits, [1], seed=seed)])[0]
        assert plain == run([Row(logits, [1], seed=seed, top_k=2999)])[0]
        assert plain == run([Row(logits, [1], seed=seed, top_k=5000)])[0]


def test_extreme_penalties_stay_finite() -> None:
    late = Row([-5.0, 0.0, 4.0], [0], 5000, eos=[0], length_penalty_factor=10.0, greedy=True)
    zero = Row([-5.0, 0.0, 4.0], [0], 5000, eos=[1], length_penalty_factor=10.0)
    tiny = Row([3.0, 1.0, 2.0], [1], repetition_penalty=1e-30, temperature=0.05)
    huge = Row([3.0, 1.0, -2.0], [0, 1, 2], repetition_penalty=1e30, temperature=0.05)
    hot = Row([3.0, 1.0, -2.0], [0], temperature=1e30)
    tokens, scores, usable = run([late, zero, tiny, huge, hot])
    assert usable == [True] * 5
    assert not scores.isnan().any()
    assert (tokens[0], tokens[2]) == (0, 1)


def test_rows_without_a_finite_choice_are_told_apart() -> None:
    good = Row([1.0, 2.0, 3.0], [0], seed=3)
    bad = [
        Row([1.0, math.nan, 3.0], [0]),
        Row([1.0, INF, 3.0], [0], top_k=2),
        Row([-INF] * 3, [0], top_p=0.5),
        Row([math.nan] * 3, [0], greedy=True),
        Row([math.nan] * 3, [0], typical_p=0.5, top_p=0.5),
        Row([1.0, 2.0, 3.0], [0], min_new_tokens=2, eos=[0, 1, 2]),
    ]
    tokens, _, usable = run([good, *bad, good])
    assert usable == [True, *[False] * len(bad), True]
    assert tokens[0] == tokens[-1] == run([good])[0][0]
    assert run([Row([1.0, math.nan], [0], greedy=True)])[2] == [False]
    masked = Row([-INF, 1.0, -INF], [0], top_p=0.9, eos=[0], length_penalty_factor=2.0, num_generated=9)
    tokens, scores, usable = run([masked])
    assert (tokens, usable, scores[0, 0].item()) == ([1], [True], -INF)


def test_seen_tokens_are_forgotten_with_their_row() -> None:
    seen = SeenTokens(6, CPU)
    seen.start(20, np.array([1, 1, 3], np.int32))
    seen.start(2, np.array([0], np.int32))
    seen.add(np.array([20, 2]), np.array([5, 4], np.int32))
    assert [mask.nonzero().flatten().tolist() for mask in seen.select(np.array([2, 20]))] == [
        [0, 4],
        [1, 3, 5],
    ]
    seen.start(20, np.array([2], np.int32))
    assert seen.select(np.array([20]))[0].nonzero().flatten().tolist() == [2]


def expected_top(scores: list[float], n: int) -> list[int]:
    edge = sorted(scores, reverse=True)[min(n, len(scores)) - 1]
    found = [i for i, x in enumerate(scores) if x >= edge and x > -INF][: 4 * n]
    return sorted(found, key=lambda i: (-scores[i], i))


def test_details_follow_the_rules() -> None:
    rng = random.Random(9)
    for vocab_size in (3, 50, 500):
        scores = torch.tensor(
            [
                [rng.choice([-INF, float(rng.randint(-3, 3)), rng.gauss(0, 3)]) for _ in range(vocab_size)]
                for _ in range(80)
            ]
        )
        scores[:, 1] = 0.5
        scores[0] = 1.0
        token_ids = [rng.choice([i for i, x in enumerate(row) if x > -INF]) for row in scores.tolist()]
        top_n = np.array([rng.choice([0, 1, 2, 5, 10]) for _ in token_ids])
        got = describe(scores, torch.tensor(token_ids), top_n)
        oracle = scores.double().log_softmax(-1)
        starts = np.concatenate([[0], np.cumsum(got.top_counts)])
        for i, (row, token) in enumerate(zip(scores.tolist(), token_ids, strict=True)):
            assert got.logprobs[i] == pytest.approx(oracle[i, token].item(), abs=1e-5)
            assert got.ranks[i] == 1 + sum(x > row[token] for x in row)
            ids = got.top_ids[starts[i] : starts[i + 1]].tolist()
            assert ids == (expected_top(row, int(top_n[i])) if top_n[i] else [])
            assert got.top_logprobs[starts[i] : starts[i + 1]] == pytest.approx(
                oracle[i, ids].numpy(), abs=1e-5
            )
