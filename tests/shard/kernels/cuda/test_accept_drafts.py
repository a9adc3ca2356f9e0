"""accept_drafts against its contract, and rounds of sampling against samples one after the other."""

import random
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.cuda.interpreter import interpreted, interpreted_modules
from tests.support.cuda.program_order import reversed_programs
from tests.support.cuda.sampled_rows import Cases, SampledRows
from tgis.shard.kernels.cuda.functions import accept_drafts
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.step_state import Flag, RowState, StagedStep
from tgis.shard.runner.device.device_step import DeviceModel, RoundMemory, sample_next

SAMPLED, ENDED, UNUSABLE = (int(flag) for flag in Flag)
NONE: Any = torch.empty(0)


def place(values: list[int], offset: int = 3) -> Tensor:
    """Return int32 values inside memory with other values."""
    memory = torch.full((offset + len(values) + 600,), 7, dtype=torch.int32)
    memory[offset : offset + len(values)] = torch.tensor(values, dtype=torch.int32)
    return memory[offset : offset + len(values)]


def stage(token_rows: list[int], token_ids: list[int], sampled_x: list[int]) -> StagedStep:
    fields = dict.fromkeys(StagedStep._fields, NONE)
    fields |= {"token_rows": place(token_rows), "token_ids": place(token_ids), "sampled_x": place(sampled_x)}
    return StagedStep(**fields)


def make_state(num_rows: int) -> RowState:
    return RowState(torch.empty(num_rows + 1, 0), *[NONE] * 8, dummy_slot=0)


def draw_step(rng: random.Random, num_rows: int) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    """Return rows and ids of tokens, indices of samples, and answers of a step with drafts, without drafts,
    and with prompts of which some are not sampled. At its end, a captured step is padded."""
    token_rows, token_ids, sampled_x, answers = list[int](), list[int](), list[int](), list[list[int]]()
    for row in rng.sample(range(num_rows), num_rows):
        num_prompt = rng.choice([0, 0, 0, 1, 5])
        num_drafts = 0 if num_prompt else rng.choice([0, 1, 3])
        token_rows += [row] * (num_prompt + 1 + num_drafts)
        token_ids += [rng.randrange(3) for _ in range(num_prompt)] + [-1]
        if not num_prompt or rng.random() < 0.5:
            sampled_x.append(len(token_ids) - 1)
            answers.append([rng.randrange(3), rng.choice([SAMPLED, SAMPLED, SAMPLED | ENDED, UNUSABLE, 0])])
        for _ in range(num_drafts):
            sampled_x.append(len(token_ids))
            token_ids.append(rng.randrange(3))
            flags = rng.choice([0, 0, SAMPLED, SAMPLED | ENDED])
            answers.append([rng.randrange(3) if flags else 0, flags])
    for _ in range(rng.choice([0, 3])):
        sampled_x.append(0)
        answers.append([0, 0])
    return token_rows, token_ids, sampled_x, answers


def expect(
    token_rows: list[int], token_ids: list[int], sampled_x: list[int], answers: list[list[int]], idle_row: int
) -> list[int]:
    expected = [idle_row] * len(sampled_x)
    for i in range(1, len(sampled_x)):
        before, x = sampled_x[i - 1 : i + 1]
        is_draft = x == before + 1 and token_rows[x] == token_rows[before]
        if is_draft and answers[i - 1] == [token_ids[x], SAMPLED] and not answers[i][1]:
            expected[i] = token_rows[x]
    return expected


@pytest.mark.parametrize("how", ["plain", "launch", "reversed"])
@pytest.mark.parametrize("num_rows", [1, 9, 260])
def test_samples_after_accepted_drafts_are_next(num_rows: int, how: str) -> None:
    rng = random.Random(num_rows)
    kernel = accept_drafts.plain if how == "plain" else interpreted().accept_drafts
    num_accepted = 0
    for _ in range(5):
        token_rows, token_ids, sampled_x, answers = draw_step(rng, num_rows)
        staged, given = stage(token_rows, token_ids, sampled_x), torch.tensor(answers, dtype=torch.int32)
        before, next_rows = given.clone(), place([-9] * len(sampled_x))
        with reversed_programs() if how == "reversed" else nullcontext():
            kernel(staged, make_state(num_rows), given, next_rows)
        expected = expect(token_rows, token_ids, sampled_x, answers, num_rows)
        assert next_rows.tolist() == expected
        assert torch.equal(given, before)
        num_accepted += sum(row != num_rows for row in expected)
    assert num_accepted or num_rows == 1


@pytest.mark.parametrize("how", ["plain", "launch"])
def test_no_samples(how: str) -> None:
    kernel = accept_drafts.plain if how == "plain" else interpreted().accept_drafts
    kernel(stage([0], [5], []), make_state(3), torch.empty((0, 2), dtype=torch.int32), place([]))


def choose_kernels(how: str, monkeypatch: pytest.MonkeyPatch) -> Implementations:
    if how == "plain":
        return Implementations.plain()
    monkeypatch.setattr(interpreted_modules()["sample"], "BLOCK", 128)
    return interpreted()


@pytest.mark.parametrize(("how", "num_rows"), [("plain", 60), ("launch", 5)])
def test_rounds_are_samples_one_after_the_other(
    how: str, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the tokens of rows with every parameter, and the state of those with right drafts. Some drafts
    are wrong or follow an end."""
    kernels, vocab_size, num_drafts = choose_kernels(how, monkeypatch), 205, 3
    rows, cases = SampledRows(num_rows, vocab_size), Cases(5, vocab_size)
    for row in range(num_rows):
        rows.open(cases.message(row))
    logits = cases.logits(num_rows * (num_drafts + 1))
    alone = deepcopy(rows.state)
    with np.errstate(all="ignore"):
        truth = sample_alone(kernels, alone, logits.clone(), num_drafts)
        answers, expected = check_rounds(kernels, rows.state, logits, truth, cases.rng)
    assert answers == expected
    lengths = {sum(bool(flags) for _, flags in row) for row in expected}
    assert {1, 3} <= lengths
    right = [row for row, answer in enumerate(expected) if answer == truth[row]]
    assert torch.equal(rows.state.words[right], alone.words[right])
    assert torch.equal(rows.state.token_counts[right], alone.token_counts[right])


def sample_alone(
    kernels: Implementations, state: RowState, logits: Tensor, num_drafts: int
) -> list[list[tuple[int, int]]]:
    """Return the answers of each row, sampled with the logits of its positions one after the other."""
    order, count = torch.arange(state.idle_row, dtype=torch.int32), num_drafts + 1
    results: list[list[tuple[int, int]]] = [[] for _ in order]
    for place_ in range(count):
        answers = torch.full((len(order), 2), -1, dtype=torch.int32)
        kernels.sample(logits[place_::count].contiguous(), state, order, answers)
        for row, (token_id, flags) in enumerate(answers.tolist()):
            results[row].append((token_id, flags))
    return results


def check_rounds(
    kernels: Implementations,
    state: RowState,
    logits: Tensor,
    truth: list[list[tuple[int, int]]],
    rng: random.Random,
) -> tuple[list[list[tuple[int, int]]], list[list[tuple[int, int]]]]:
    """Return the answers of all rounds, and the expected ones, of each row."""
    count, idle = len(truth[0]), state.idle_row
    token_rows, token_ids, expected = list[int](), list[int](), list[list[tuple[int, int]]]()
    for row, known in enumerate(truth):
        drafts = [token if rng.random() < 0.8 else (token + 1) % 205 for token, _ in known[:-1]]
        num_right = next((i for i, token in enumerate(drafts) if (token, SAMPLED) != known[i]), len(drafts))
        token_rows += [row] * count
        token_ids += [-1, *drafts]
        expected.append([*known[: num_right + 1], *[(0, 0)] * (count - num_right - 1)])
    staged = stage(token_rows, token_ids, list(range(len(token_ids))))
    first = torch.tensor([row if i % count == 0 else idle for i, row in enumerate(token_rows)])
    answers, memory = (
        torch.full((len(token_ids), 2), -1, dtype=torch.int32),
        RoundMemory(
            torch.full((len(token_ids),), -1, dtype=torch.int32),
            torch.full((len(token_ids), 2), -1, dtype=torch.int32),
        ),
    )
    kernels.sample(logits, state, first.int(), answers)
    on = DeviceModel(None, None, kernels, state, has_long=False)  # type: ignore[arg-type]
    for _ in range(count - 1):
        sample_next(on, staged, logits, answers, memory)
    pairs = [(token_id, flags) for token_id, flags in answers.tolist()]
    return [pairs[i : i + count] for i in range(0, len(pairs), count)], expected
