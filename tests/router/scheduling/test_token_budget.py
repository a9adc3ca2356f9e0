"""Check the prediction of step times, and the prompt budget derived from it."""

import random

import pytest

from tgis.router.scheduling.token_budget import MIN_PROMPT_TOKENS, TokenBudget


def observed(fixed: float, per_token: float, sizes: list[int], decode_step_s: float = 0.1) -> TokenBudget:
    budget = TokenBudget(2048, decode_step_s)
    for size in sizes:
        budget.observe(size, fixed + per_token * size)
    return budget


def test_learns_a_line() -> None:
    r = random.Random(0)
    budget = observed(0.01, 0.001, [r.randint(1, 500) for _ in range(50)])
    assert budget.predict(200) == pytest.approx(0.21, rel=1e-3)


def test_follows_a_machine_that_becomes_slower() -> None:
    r = random.Random(0)
    budget = observed(0.01, 0.001, [r.randint(1, 500) for _ in range(50)])
    for size in (r.randint(1, 500) for _ in range(400)):
        budget.observe(size, 0.02 + 0.002 * size)
    assert budget.predict(200) == pytest.approx(0.42, rel=0.01)


def test_one_size_of_step_says_nothing_of_the_fixed_part() -> None:
    budget = observed(0.01, 0.001, [100] * 20)
    assert budget.predict(100) == pytest.approx(0.11)


def test_prompts_get_the_whole_budget_without_decodes() -> None:
    assert observed(0.01, 0.001, [1, 300, 20]).prompt_tokens(0, 3) == 2048
    assert TokenBudget(2048, 0.1).prompt_tokens(8, 3) == 2040  # nothing is measured yet


def test_prompts_get_the_budget_that_decodes_leave() -> None:
    budget = observed(0.01, 0.001, [1, 300, 20])
    assert budget.prompt_tokens(10, 1) == pytest.approx(20, abs=1)  # 40 ms, twice as long as without prompts
    assert budget.prompt_tokens(10, 2) == pytest.approx(40, abs=1)
    assert budget.prompt_tokens(10, 9) == pytest.approx(80, abs=1)  # 100 ms
    assert budget.prompt_tokens(70, 1) == pytest.approx(20, abs=1)
    assert budget.prompt_tokens(30, 1) == pytest.approx(40, abs=1)


def test_a_prompt_always_comes_forward() -> None:
    assert observed(0.5, 0.01, [1, 300, 20]).prompt_tokens(10, 9) == MIN_PROMPT_TOKENS
    assert TokenBudget(8, 0.1).prompt_tokens(8, 1) == MIN_PROMPT_TOKENS


def test_a_step_may_take_ten_times_as_long_as_predicted() -> None:
    budget = TokenBudget(2048, 1.0)
    assert budget.timeout(5) == 0, "nothing is known yet"
    for _ in range(30):
        for num_tokens in (10, 100):
            budget.observe(num_tokens, 1.0 + 0.02 * num_tokens)
    assert budget.timeout(100) == pytest.approx(10 * 3.0)
    assert budget.timeout(10) == pytest.approx(10 * 1.2)
    fast = TokenBudget(2048, 1.0)
    fast.observe(100, 0.05)
    assert fast.timeout(100) == 10


def test_steps_larger_than_any_before_get_more_time_in_proportion() -> None:
    """Check small steps of equal time, which is spent reading the weights and says nothing of large steps."""
    budget = TokenBudget(2048, 1.0)
    for num_tokens in (1, 2, 1, 2):
        budget.observe(num_tokens, 0.5)
    assert budget.timeout(2048) == pytest.approx(10 * 0.5 * 1024)
