"""Models with recurrent layers behind the scheduler, with steps in flight, few blocks and states, prompts cut
at any token, equal prompts, cancelled sequences and lost shards: tokens and log-probabilities are those of
sequences that run alone, and no state is leaked."""

import random
from collections.abc import Callable

import pytest

from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import configure
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.pipelined import PipelinedService
from tests.support.shard.scheduled import Result, compute_alone, draw_ids, greedy, results
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.load import load

Runners = Callable[[str], ModelRunner]
OTHERS = ("qwen3_next", "mamba2", "nemotron_h_experts", "falcon_h1")


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Runners:
    loaded: dict[str, ModelRunner] = {}

    def find(case: str) -> ModelRunner:
        if case not in loaded:
            directory = tmp_path_factory.mktemp(case)
            write_model(directory, CASES[case]())
            options = {"block_size": 4, "kv_cache_tokens": 1024, "dtype": "float32"}
            loaded[case] = load(configure(directory, **options))
        return loaded[case]

    return find


@pytest.mark.parametrize("seed", range(2))
def test_results_never_depend_on_the_pipeline(seed: int, runners: Runners) -> None:
    check(runners("granitemoehybrid"), seed)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_results_of_other_families_never_depend_on_the_pipeline(case: str, runners: Runners) -> None:
    for seed in range(100, 125):
        check(runners(case), seed)


def check(runner: ModelRunner, seed: int) -> None:
    rng = random.Random(seed)
    num_tokens = rng.choice([3, 12, 20])
    prompts = draw_prompts(rng, seed)
    expected = {tuple(prompt): compute_alone(runner, prompt, num_tokens) for prompt in prompts}
    runner.reset()
    service = PipelinedService(
        runner,
        num_blocks=rng.choice([17, 18, 20, 24]),
        num_states=rng.choice([1, 2, 3, 6, 9, 16]),
        interval=rng.choice([4, 8, 12, 16, 64]),
        max_prompt_tokens=rng.choice([0, 0, 1, 4, 5]),
        seed=seed,
        depth=rng.choice([1, 2, 2]),
        cancelling=rng.choice([0, 0.02, 0.1]),
        losing=rng.choice([0, 0, 0.02]),
    )
    sequences = [greedy(prompt, num_tokens) for prompt in prompts]
    service.run_all(sequences)
    for sequence, result in zip(sequences, results(service, sequences), strict=True):
        whole = expected[tuple(sequence.token_ids[: sequence.prompt_len])]
        if sequence in service.cancelled:
            assert begins(whole, result)
        else:
            assert result == whole
    states = service.scheduler.pool.states
    assert states is not None
    assert states.resource_count.is_balanced
    assert not states.num_used


def draw_prompts(rng: random.Random, seed: int) -> list[list[int]]:
    """Return prompts with shared prefixes, or few different prompts many times."""
    prefixes = [draw_ids(seed + i, rng.choice([16, 33, 40])) for i in range(2)]
    prompts = [
        rng.choice(prefixes)[: rng.randint(1, 40)] + draw_ids(i + 1000 * seed, rng.randint(1, 9))
        for i in range(rng.choice([4, 10]))
    ]
    first = prompts[0]
    return [first] * 4 + [[*first[:-1], 5]] * 2 + prompts[:2] if rng.random() < 0.3 else prompts


def begins(whole: Result, result: Result) -> bool:
    return all(full[: len(part)] == part for full, part in zip(whole, result, strict=True))
