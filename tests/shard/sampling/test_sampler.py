"""Check the batched sampler against a plain model of its rules, which computes one row at a time."""

import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import (
    ExponentialDecayLengthPenalty,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from tests.support import plain_sampling
from tests.support.plain_sampling import ORDER, Row, single
from tgis.shard.sampling.logprobs import compute_details
from tgis.shard.sampling.sampler import (
    ROW_PARAMETERS,
    LogitBias,
    Modifiers,
    SamplingBatch,
    SeenTokens,
    sample,
)

INF = math.inf
CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Use two threads, which is enough to split the sum over a single row."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


def run(rows: list[Row], wants_details: bool = True) -> tuple[list[int], torch.Tensor, list[bool]]:
    """Return the tokens, the scores after all processors, and whether each row is usable."""
    values = [tuple(getattr(row, name) for name in ROW_PARAMETERS.names) for row in rows]
    params = np.array(values, ROW_PARAMETERS)
    eos = np.full((len(rows), max(1, *(len(row.eos) for row in rows), 1)), -1, np.int32)
    scores = torch.tensor([row.logits for row in rows], dtype=torch.float32)
    token_ids = np.zeros((len(rows), max(len(row.token_ids) for row in rows) + 3), np.int32)
    bias_token_ids = np.full((len(rows), max(len(row.logit_bias) for row in rows)), -1, np.int32)
    biases = np.zeros(bias_token_ids.shape, np.float32)
    seen = SeenTokens(scores.shape[-1], CPU)
    for i, row in enumerate(rows):
        eos[i, : len(row.eos)] = row.eos
        token_ids[i, : len(row.token_ids)] = row.token_ids
        bias_token_ids[i, : len(row.logit_bias)] = list(row.logit_bias)
        biases[i, : len(row.logit_bias)] = list(row.logit_bias.values())
        seen.start(i, np.array(row.token_ids, np.int32))
    batch = SamplingBatch(
        rows=np.arange(len(rows)),
        params=params,
        num_generated=np.array([row.num_generated for row in rows]),
        positions=np.array([len(row.token_ids) for row in rows]),
        token_ids=token_ids,
        eos_token_ids=eos,
        wants_details=np.full(len(rows), wants_details),
        bias=LogitBias.pack(bias_token_ids, biases, CPU),
        modifiers=Modifiers.of(params),
    )
    tokens, usable = sample(scores, batch, seen)
    return tokens.tolist(), scores, usable.tolist()


SPREADS = {"normal": 3.0, "flat": 0.01, "ties": 2.0, "peaked": 12.0, "excluded": 3.0}
REPETITION = [1.0, 1.0, 1.0, 0.5, 1.25, 4.0, 100.0, 1e-38, 3e38]


def random_row(rng: random.Random, vocab_size: int) -> Row:
    """Return a row in which every processor is on or off independently of the others."""
    kind = rng.choice(list(SPREADS))
    logits = [rng.gauss(0, SPREADS[kind]) for _ in range(vocab_size)]
    if kind == "ties":
        logits = [float(round(x)) for x in logits]
    if kind == "excluded":
        logits = [x if i == 1 or rng.random() < 0.5 else -INF for i, x in enumerate(logits)]
    token_ids = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 40))]
    row = Row(np.float32(logits).tolist(), token_ids, num_generated=rng.randint(0, min(20, len(token_ids))))
    row.eos = rng.sample(range(vocab_size), rng.randint(0, 3)) + rng.choice([[], [vocab_size + 5]])
    row.greedy, row.seed = rng.random() < 0.2, rng.getrandbits(64)
    row.repetition_penalty = single(rng.choice(REPETITION))
    row.min_new_tokens = rng.choice([0, 0, 5, 12, 2**32 - 1])
    row.length_penalty_start = rng.choice([0, 3, 10, 2**32 - 1])
    row.length_penalty_factor = single(rng.choice([1.0, 1.0, 1.01, 1.5, 10.0]))
    row.presence_penalty = single(rng.choice([0.0, 0.0, 0.0, 0.6, -2.0]))
    row.frequency_penalty = single(rng.choice([0.0, 0.0, 0.0, 0.1, -1.3, 2.0]))
    row.watermark_gamma = rng.choice([0.0, 0.0, 0.0, 0.5, 0.7, 1.0])
    row.watermark_delta = single(rng.choice([2.0, 0.3, -1.0]))
    if rng.random() < 0.3:
        biased = rng.sample(range(vocab_size), rng.randint(1, min(20, vocab_size)))
        row.logit_bias = {i: rng.choice([100.0, -100.0, rng.gauss(0, 3)]) for i in biased}
    if not row.greedy:
        row.temperature = single(rng.choice([1.0, 1.0, 0.5, 2.0, 0.05, 1000.0]))
        row.top_k = rng.choice(
            [0, 0, 1, 2, 5, 63, 64, 65, vocab_size - 1, vocab_size, vocab_size + 1, 2**31 - 1]
        )
        row.top_p = single(rng.choice([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.999]))
        row.min_p = single(rng.choice([0.0, 0.0, 0.0, 1e-9, 0.02, 0.3, 1.0]))
        row.typical_p = single(rng.choice([1.0, 1.0, 1.0, 1e-6, 0.05, 0.5, 0.95]))
    return row


def combination(row: Row) -> tuple[bool, ...]:
    return (
        row.greedy,
        row.temperature != 1,
        row.top_k > 0,
        row.top_p < 1,
        row.min_p > 0,
        row.typical_p < 1,
        row.repetition_penalty != 1,
        row.num_generated < row.min_new_tokens,
        row.length_penalty_factor != 1,
        row.presence_penalty != 0 or row.frequency_penalty != 0,
        row.watermark_gamma > 0,
        bool(row.logit_bias),
    )


@pytest.mark.parametrize(
    ("vocab_size", "batches"), [(3, 220), (40, 220), (150, 50), (300, 25), (2500, 4), (20_000, 1)]
)
def test_agrees_with_the_rules(vocab_size: int, batches: int) -> None:
    """Check the scores after all processors and the tokens chosen with them."""
    rng = random.Random(vocab_size)
    num_scores = num_choices = 0
    combinations = set()
    for _ in range(batches):
        rows = [random_row(rng, vocab_size) for _ in range(rng.randint(1, 24))]
        tokens, scores, usable = run(rows)
        for row, token, actual, fit in zip(rows, tokens, scores.tolist(), usable, strict=True):
            if all(x == -INF for x in plain_sampling.treat_eos(row.logits, row).values):
                assert not fit, row
                continue
            assert fit, row
            expected = plain_sampling.process(row)
            if expected.mass < 1e-5 or expected.typical_order < 1e-4:
                continue
            num_scores += 1
            combinations.add(combination(row))
            assert [x == -INF for x in actual] == [x == -INF for x in expected.values], row
            assert np.allclose(actual, expected.values, rtol=2e-5, atol=1e-6)
            chosen, margin = plain_sampling.choose(row, expected.values)
            if margin > 1e-4 or row.greedy:
                num_choices += 1
                assert token == chosen, row
    assert num_choices > batches * 4
    assert num_scores > batches * 5
    assert len(combinations) > min(batches, 100)


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
            one = compute_details(score, torch.tensor([alone]), n)
            many = compute_details(scores, torch.tensor(tokens), np.repeat(n, len(rows)))
            assert one.logprobs[0] == many.logprobs[i]


def expected_usable(row: Row) -> bool:
    return row.num_generated >= row.min_new_tokens or len(set(row.eos)) < len(row.logits)


def test_the_draw_depends_on_seed_and_position() -> None:
    logits = [0.0] * 100
    places = run([Row(logits, [1] * length, seed=9) for length in range(1, 30)])[0]
    assert len(set(places)) > 20
    counts = run([Row(logits, [1] * 30, num_generated=count, seed=9) for count in range(20)])[0]
    assert set(counts) == {run([Row(logits, [2] * 30, seed=9)])[0][0]}
    assert len(set(run([Row(logits, [1], seed=seed) for seed in range(30)])[0])) > 20


def test_the_choice_does_not_depend_on_details() -> None:
    rng = random.Random(6)
    rows = [random_row(rng, 200) for _ in range(50)]
    assert run(rows, wants_details=True)[0] == run(rows, wants_details=False)[0]


def test_filters_that_leave_everything_change_nothing() -> None:
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(1)).tolist()
    for seed in range(20):
        plain = run([Row(logits, [1], seed=seed)])[0]
        assert plain == run([Row(logits, [1], seed=seed, top_k=2999)])[0]
        assert plain == run([Row(logits, [1], seed=seed, top_k=5000)])[0]


@pytest.mark.parametrize("more", [{}, {"top_k": 30}, {"top_p": 0.9}, {"typical_p": 0.9, "top_k": 50}])
def test_min_p_keeps_the_tokens_that_transformers_keeps(more: dict[str, float]) -> None:
    """Check min_p against transformers with the same temperature and filters before it."""
    rng = random.Random(3)
    for min_p in (1e-6, 0.01, 0.05, 0.2, 0.7, 1.0):
        logits = np.float32([rng.gauss(0, 3) for _ in range(400)]).tolist()
        _, scores, _ = run([Row(logits, [1], temperature=0.7, min_p=single(min_p), **more)])
        expected = TemperatureLogitsWarper(0.7)(None, torch.tensor([logits]))
        if "top_k" in more:
            expected = TopKLogitsWarper(more["top_k"])(None, expected)
        if "top_p" in more:
            expected = TopPLogitsWarper(more["top_p"])(None, expected)
        expected = MinPLogitsWarper(single(min_p))(None, expected)
        if "typical_p" in more:
            expected = TypicalLogitsWarper(more["typical_p"])(None, expected)
        assert torch.equal(scores > -INF, expected > -INF), min_p
        assert 0 < (scores > -INF).sum() < 400


def test_a_typical_p_below_zero_leaves_the_most_typical_token() -> None:
    rng = random.Random(12)
    logits = np.float32([rng.gauss(0, 3) for _ in range(300)]).tolist()
    (token,), scores, _ = run([row := Row(logits, [1], typical_p=-0.5)])
    expected = plain_sampling.process(row).values
    assert [x > -INF for x in scores[0].tolist()] == [x > -INF for x in expected]
    assert token == max(range(300), key=expected.__getitem__)


def test_min_p_changes_no_other_row_and_no_greedy_one() -> None:
    rng = random.Random(4)
    rows = [random_row(rng, 300) for _ in range(20)]
    rows = [row for row in rows if expected_usable(row)]
    for row in rows:
        row.min_p = 0.0
    tokens, scores, _ = run(rows)
    cut = Row(np.float32([rng.gauss(0, 3) for _ in range(300)]).tolist(), [1], min_p=0.5)
    more_tokens, more_scores, _ = run([cut, *rows, cut])
    assert more_tokens[1:-1] == tokens
    assert torch.equal(more_scores[1:-1], scores)


def everything_on(rng: random.Random) -> Row:
    token_ids = [rng.randrange(40) for _ in range(20)]
    return Row(
        np.float32([rng.gauss(0, 1.5) for _ in range(40)]).tolist(),
        token_ids,
        num_generated=12,
        eos=rng.sample(range(40), 3),
        seed=rng.getrandbits(64),
        temperature=1.25,
        top_k=8,
        top_p=single(0.9),
        min_p=single(0.1),
        typical_p=single(0.8),
        repetition_penalty=1.5,
        length_penalty_start=6,
        length_penalty_factor=1.25,
        presence_penalty=single(0.7),
        frequency_penalty=single(0.3),
        watermark_gamma=0.5,
        watermark_delta=2.0,
        logit_bias={i: rng.gauss(0, 3) for i in rng.sample(range(40), 9)},
    )


def agree(actual: list[float], scores: list[float]) -> bool:
    is_excluded = [x == -INF for x in actual] == [x == -INF for x in scores]
    return is_excluded and np.allclose(actual, scores, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("place", range(len(ORDER) - 1))
def test_no_two_neighbours_may_be_exchanged(place: int) -> None:
    """Check that exchanging any two neighbouring processors changes the scores, except temperature and
    top_k."""
    exchanged = [*ORDER]
    exchanged[place], exchanged[place + 1] = ORDER[place + 1], ORDER[place]
    rng = random.Random(place)
    # The order of bias and watermark changes only the rounding.
    rounded = {"logit_bias": {0: -1e8}, "watermark_gamma": 1.0, "watermark_delta": 2.0}
    rows = [Row([1e8, *[0.0] * 39], [1], **rounded)]
    rows += [everything_on(rng) for _ in range(60)]
    num_different = 0
    for row, actual in zip(rows, run(rows)[1].tolist(), strict=True):
        expected, other = plain_sampling.process(row), plain_sampling.process(row, exchanged)
        if min(expected.mass, other.mass) < 1e-5 or min(expected.typical_order, other.typical_order) < 1e-4:
            continue
        assert agree(actual, expected.values)
        num_different += not agree(actual, other.values)
    commute = ORDER[place : place + 2] == (plain_sampling.divide, plain_sampling.keep_best)
    assert (num_different == 0) == commute


def test_the_beginning_of_the_order_is_transformers() -> None:
    """Check the processors that transformers also has.

    Its watermark uses another green list, and it has no penalties for generated tokens alone."""
    rng = random.Random(8)
    for _ in range(20):
        row = everything_on(rng)
        row.presence_penalty = row.frequency_penalty = row.watermark_gamma = 0.0
        row.greedy, ids = True, torch.tensor([row.token_ids])
        expected = torch.tensor([row.logits])
        for processor in (
            SequenceBiasLogitsProcessor({(i,): x for i, x in row.logit_bias.items()}),
            ExponentialDecayLengthPenalty((row.length_penalty_start, 1.25), row.eos, 20 - row.num_generated),
            RepetitionPenaltyLogitsProcessor(row.repetition_penalty),
        ):
            expected = processor(ids, expected)
        (token,), scores, _ = run([row])
        assert torch.allclose(scores, expected, rtol=1e-6)
        assert token == expected.argmax()


def test_generated_tokens_are_penalized_as_by_openai() -> None:
    """Check the penalties against values computed by hand."""
    row = Row([1.0, 2.0, -3.0, 4.0], [3, 3, 0, 1, 2, 1, 1], num_generated=4, greedy=True)
    row.presence_penalty, row.frequency_penalty = 0.5, 0.25
    assert run([row])[1].tolist() == [[1.0, 2.0 - 0.5 - 3 * 0.25, -3.0 - 0.5 - 0.25, 4.0]]
    row.presence_penalty, row.num_generated = -2.0, 1
    assert run([row])[1].tolist() == [[1.0, 2.0 + 2.0 - 0.25, -3.0, 4.0]]
    row.num_generated = 0
    assert run([row])[1].tolist() == [row.logits]


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


def test_rows_without_a_finite_choice_are_detected() -> None:
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
        actual = compute_details(scores, torch.tensor(token_ids), top_n)
        oracle = scores.double().log_softmax(-1)
        starts = np.concatenate([[0], np.cumsum(actual.top_counts)])
        for i, (row, token) in enumerate(zip(scores.tolist(), token_ids, strict=True)):
            assert actual.logprobs[i] == pytest.approx(oracle[i, token].item(), abs=1e-5)
            assert actual.ranks[i] == plain_sampling.rank(row, token)
            ids = actual.top_ids[starts[i] : starts[i + 1]].tolist()
            assert ids == plain_sampling.best_tokens(row, int(top_n[i]))
            assert actual.top_logprobs[starts[i] : starts[i + 1]] == pytest.approx(
                oracle[i, ids].numpy(), abs=1e-5
            )
