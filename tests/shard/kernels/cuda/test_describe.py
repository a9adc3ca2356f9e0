"""Token details on a GPU against the CPU's sampler."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.cuda.detailed_rows import DetailedCases, DetailedRows, Kernels
from tests.support.cuda.interpreter import interpreted_modules
from tests.support.cuda.sampled_rows import CPU
from tests.support.shard.messages import GREEDY, SAMPLE, open_row
from tgis.shard.kernels.cuda import sample as compiled_sample
from tgis.shard.kernels.cuda.details import describe as compiled
from tgis.shard.kernels.cuda.step_state import MAX_TOP_N, MAX_TOPS, DetailQuestions, DeviceDetails
from tgis.shard.runner.device.details.copies import CopiedDetails
from tgis.shard.sampling.logprobs import TokenDetails, compute_details

# The CPU adds the probabilities in float32, so its sum differs from the exact one by up to this.
TOLERANCE = 2e-6


@pytest.fixture(params=["plain", "launch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    if request.param == "plain":
        return compiled_sample.plain, compiled.plain
    modules = interpreted_modules()
    monkeypatch.setattr(modules["sample"], "BLOCK", 128)
    monkeypatch.setattr(modules["describe"], "GROUP", 16)
    ignore = np.errstate(all="ignore")
    return ignore(modules["sample"].launch), ignore(modules["describe"].launch)


def compare(actual: TokenDetails, expected: TokenDetails, tolerance: float = TOLERANCE) -> None:
    assert actual.ranks.tolist() == expected.ranks.tolist()
    assert actual.top_counts.tolist() == expected.top_counts.tolist()
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, rtol=1e-6, atol=tolerance)
    np.testing.assert_allclose(actual.top_logprobs, expected.top_logprobs, rtol=1e-6, atol=tolerance)
    ends = expected.top_counts.cumsum()
    for begin, end in zip(ends - expected.top_counts, ends, strict=True):
        ids, known = actual.top_ids[begin:end].tolist(), expected.top_ids[begin:end].tolist()
        assert sorted(ids) == sorted(known)
        for i, token_id in enumerate(ids):  # rounding decides the order of almost equal tokens
            numbers = expected.top_logprobs[begin:end]
            assert abs(numbers[i] - numbers[known.index(token_id)]) <= tolerance


def check_against_cpu(kernels: Kernels, vocab_size: int, num_rows: int, seed: int) -> None:
    rows, cases = DetailedRows(num_rows, vocab_size), DetailedCases(seed, vocab_size)
    for row in range(num_rows):
        rows.open(cases.message(row))
    logits = cases.logits(num_rows)
    actual = rows.sample_on_device(kernels, logits)
    expected = rows.sample_on_cpu(logits)
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    assert actual.kept.tolist() == expected.kept.tolist()
    assert actual.details is not None
    assert expected.details is not None
    assert actual.details.at.tolist() == expected.details.at.tolist()
    assert actual.details.wanted.tolist() == expected.details.wanted.tolist()
    compare(actual.details.details, expected.details.details)


@pytest.mark.parametrize(("vocab_size", "num_rows", "num_interpreted"), [(40, 200, 10), (333, 150, 6)])
def test_rows_have_the_details_of_the_cpu(
    kernels: Kernels, vocab_size: int, num_rows: int, num_interpreted: int
) -> None:
    num_rows = num_rows if kernels[1] is compiled.plain else num_interpreted
    check_against_cpu(kernels, vocab_size, num_rows, seed=vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_rows_have_the_details_of_the_cpu_at_length(kernels: Kernels, seed: int) -> None:
    num_rows = 200 if kernels[1] is compiled.plain else 40
    check_against_cpu(kernels, [35, 128, 256, 333, 700][seed % 5], num_rows, seed=1000 + seed)


def test_filtered_tokens_have_no_details(kernels: Kernels) -> None:
    """The others share all of the probability. Raw details include all tokens."""
    filters: list[dict[str, Any]] = [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"typical_p": 0.5}]
    rows, logits = DetailedRows(8, 60), torch.arange(60).div(10).expand(8, -1).contiguous()
    for row in range(8):
        details = {"logprobs": True, "ranks": True, "top_n": 20, "raw": row >= 4}
        sampling = {**SAMPLE, "seed": row, "temperature": 0.5, **filters[row % 4]}
        rows.open(open_row(row, [1, 2], sampling=sampling, **details))
    actual, expected = rows.sample_on_device(kernels, logits).details, rows.sample_on_cpu(logits).details
    assert actual is not None
    assert expected is not None
    compare(actual.details, expected.details)
    assert actual.details.top_counts[0] == 3
    assert (actual.details.top_counts[:4] < 20).all()
    assert (actual.details.top_counts[4:] == 20).all()


def make_scores(kind: str, num_rows: int, vocab_size: int) -> Tensor:
    scores = 3 * torch.randn(num_rows, vocab_size)
    if kind == "ties":
        return scores.round()
    if kind == "excluded":  # in some rows, all but one
        scores[torch.rand(num_rows, vocab_size) < torch.linspace(0.5, 1, num_rows)[:, None]] = -torch.inf
        scores[:, vocab_size // 2] = -1.0
    if kind == "equal":
        scores[:] = 1.0
    if kind == "ascending":
        return torch.arange(vocab_size).float().div(100).expand(num_rows, -1).contiguous()
    if kind == "one group":  # has all the highest scores
        scores[:, 2 : min(vocab_size, 14)] += 50
    return scores


def describe(kernels: Kernels, scores: Tensor, token_ids: Tensor, top_n: list[int]) -> TokenDetails:
    queries = torch.stack([token_ids, torch.tensor(top_n), torch.ones_like(token_ids)], 1).int()
    details = DeviceDetails.empty(len(scores), MAX_TOPS, CPU)
    kernels[1](DetailQuestions(scores.clone(), queries), details)
    return CopiedDetails(details.words.numpy(), details.logprobs.numpy()).read()


@pytest.mark.parametrize(
    "vocab_size", [1, 300, *(pytest.param(size, marks=pytest.mark.slow) for size in (7, 4100))]
)
@pytest.mark.parametrize("kind", ["normal", "ties", "excluded", "equal", "ascending", "one group"])
def test_scores_of_every_kind(kernels: Kernels, kind: str, vocab_size: int) -> None:
    top_n = [0, 1, 2, 5, MAX_TOP_N]
    scores = make_scores(kind, len(top_n), vocab_size)
    token_ids = torch.randint(vocab_size, (len(top_n),))
    token_ids[scores.gather(1, token_ids[:, None])[:, 0] == -torch.inf] = vocab_size // 2
    expected = compute_details(scores, token_ids, np.array(top_n))
    compare(describe(kernels, scores, token_ids, top_n), expected)


@pytest.mark.parametrize(
    "vocab_size", [50_257, *(pytest.param(size, marks=pytest.mark.slow) for size in (128_256, 256_000))]
)
def test_details_among_many_tokens(
    kernels: Kernels, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the block size of GPUs. The results are nearer to the exact ones than the CPU's are."""
    monkeypatch.setattr(interpreted_modules()["describe"], "GROUP", compiled.GROUP)
    scores = 3 * torch.randn(3, vocab_size)
    scores[1] = scores[1].round()
    token_ids, top_n = torch.randint(vocab_size, (3,)), [20, 20, 1]
    expected = compute_details(scores, token_ids, np.array(top_n))
    actual = describe(kernels, scores, token_ids, top_n)
    compare(actual, expected, tolerance=1e-4)
    if kernels[1] is not compiled.plain:
        exact = scores.double().log_softmax(-1).gather(1, token_ids[:, None])[:, 0]
        np.testing.assert_allclose(actual.logprobs, exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scores_that_are_no_numbers_have_no_logprobs(kernels: Kernels, value: float) -> None:
    """A grammar's mask may have hidden them from the sampler, but raw details include them."""
    scores = torch.randn(2, 40)
    scores[0, 7] = value
    details = describe(kernels, scores, torch.tensor([3, 3]), [2, 2])
    assert np.isnan(details.logprobs).tolist() == [True, False]
    assert details.top_counts.tolist() == [0, 2]


def test_questions_that_are_not_asked_have_no_answers(kernels: Kernels) -> None:
    queries = torch.full((3, 3), 2**30, dtype=torch.int32)
    queries[:, 2] = 0
    details = DeviceDetails.empty(3, MAX_TOPS, CPU)
    details.words.fill_(-7)
    details.logprobs.fill_(-7.0)
    kernels[1](DetailQuestions(torch.full((3, 40), torch.nan), queries), details)
    assert all(part.eq(-7).all() for part in details)


@pytest.mark.parametrize("sampling", [GREEDY, {**SAMPLE, "temperature": 0.7}])
def test_details_do_not_change_tokens(kernels: Kernels, sampling: dict[str, Any]) -> None:
    sample = kernels[0]
    cases, num_rows = DetailedCases(5, 150), 8
    logits = cases.logits(num_rows)
    tokens = []
    for has_details in (False, True):
        rows = DetailedRows(num_rows, 150)
        for row in range(num_rows):
            rows.open(open_row(row, [1, 2], sampling={**sampling, "seed": row}, top_n=3))
        answers = torch.zeros(num_rows, 2, dtype=torch.int32)
        questions = [DetailQuestions.empty(num_rows, 150, CPU)] if has_details else []
        sample(logits.clone(), rows.state, torch.arange(num_rows, dtype=torch.int32), answers, *questions)
        tokens.append((answers, rows.state.words))
    assert torch.equal(tokens[0][0], tokens[1][0])
    assert torch.equal(tokens[0][1], tokens[1][1])


def test_no_questions(kernels: Kernels) -> None:
    kernels[1](DetailQuestions.empty(0, 40, CPU), DeviceDetails.empty(0, MAX_TOPS, CPU))
