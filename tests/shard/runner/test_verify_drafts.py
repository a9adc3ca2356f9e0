"""Check that drafts change only the number of steps.

An engine with right and wrong drafts is compared with the same engine without drafts, for every parameter at
once."""

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.cuda.runners import load_captured, load_late
from tests.support.shard.checkpoints import write_llama
from tests.support.shard.drafting import DraftingRouter, Foreseen
from tests.support.shard.driver import Request, Router, configure, prompts
from tests.support.shard.messages import (
    EVERY_PARAMETER,
    GREEDY,
    SAMPLE,
    Steps,
    integers,
    make_bias,
    open_row,
    rows_of_tokens,
)
from tests.support.shard.proposers import ProposerInShard
from tests.support.tokenizers.trained import write_byte_level
from tgis.config.processes import ShardConfig
from tgis.shard.runner.batch_builder import BatchBuilder
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.runner.model_runner import HostModelRunner
from tgis.shard.runner.row_table import RowLimits, RowTable
from tgis.shard.startup.load import load

VOCAB_SIZE = 403
EOS = 1
EVERYTHING = {"logprobs": True, "ranks": True, "top_n": 3}
SAMPLINGS: list[dict[str, Any]] = [
    GREEDY,
    {**GREEDY, "repetition_penalty": 1.6},
    {**GREEDY, "min_new_tokens": 7},
    {**GREEDY, "length_penalty_start": 3, "length_penalty_factor": 1.5},
    SAMPLE,
    {**SAMPLE, "top_k": 5, "repetition_penalty": 1.3, "min_new_tokens": 4},
    {**SAMPLE, "top_p": 0.8, "temperature": 0.6},
    {**SAMPLE, "typical_p": 0.7, "length_penalty_start": 2, "length_penalty_factor": 1.2},
    {**GREEDY, "presence_penalty": 1.5, "frequency_penalty": 0.8, **make_bias({EOS: -5.0, 9: 6.0})},
    EVERY_PARAMETER,
]
DETAILS: list[dict[str, Any]] = [
    {},
    EVERYTHING,
    {"logprobs": True},
    {**EVERYTHING, "input_tokens": True},
    {**EVERYTHING, "raw": True},
]
GRAMMAR = '%llguidance {"no_forcing": true}\nstart: /([a-c]{1,3} ){2,9}\\./'
# Seven tokens, an end token, and a text.
BUDGET = """%llguidance {"no_forcing": true}
start: thoughts <[300]> /[a-z ]*/
thoughts[max_tokens=7]: /(?s:.*)/"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("speculation")
    write_llama(directory, vocab_size=VOCAB_SIZE, eos_token_id=EOS)
    write_byte_level(directory, 400)
    return directory


LOADERS: dict[str, Callable[[ShardConfig], ModelRunner]] = {
    "host": load,
    "device": load_late,
    "captured": load_captured,
}


@pytest.fixture(scope="module", params=LOADERS)
def load_runner(request: pytest.FixtureRequest) -> Callable[[ShardConfig], ModelRunner]:
    return LOADERS[request.param]


@pytest.fixture(scope="module")
def runner(directory: Path, load_runner: Callable[[ShardConfig], ModelRunner]) -> ModelRunner:
    return load_runner(configure(directory, speculate=6))


@pytest.fixture(scope="module")
def host(directory: Path) -> ModelRunner:
    return load(configure(directory))


def near(runner: ModelRunner, values: Sequence[float]) -> Any:
    """Return `values` with a tolerance for devices, where several tokens of a row run through another
    kernel."""
    is_exact = isinstance(runner, HostModelRunner)
    return list(values) if is_exact else pytest.approx(list(values), rel=1e-4, abs=1e-4)


def equal_tops(runner: ModelRunner, actual: Request, expected: Request) -> bool:
    """Return whether the best tokens are equal; neighbours with nearly equal scores may change places."""
    if isinstance(runner, HostModelRunner):
        return actual.tops == expected.tops
    scores = [[score for _, score in tops] for tops in actual.tops]
    return len(scores) == len(expected.tops) and all(
        one == near(runner, [score for _, score in tops])
        for one, tops in zip(scores, expected.tops, strict=True)
    )


def make_requests(seed: int) -> list[Foreseen]:
    rng = random.Random(seed)
    requests = []
    for i, prompt in enumerate(prompts(seed, 20, longest=30)):
        sampling = {**SAMPLINGS[i % len(SAMPLINGS)]}
        if not sampling["greedy"]:
            sampling["seed"] = rng.getrandbits(64)
        eos = rng.choice([[EOS], list(range(0, VOCAB_SIZE, 9))])
        grammar = (GRAMMAR, BUDGET)[i % 2] if rng.random() < 0.25 else None
        details = rng.choice(DETAILS)
        requests.append(Foreseen(prompt, rng.randint(1, 24), eos, sampling, details, grammar))
    return requests


@pytest.mark.parametrize("luck", [0.0, 0.6, 0.9, 1.0])
def test_outputs_are_those_without_drafts(runner: ModelRunner, luck: float) -> None:
    seed = int(luck * 10)
    runner.reset()
    plain, guessed = make_requests(seed), make_requests(seed)
    router, speculator = Router(runner, seed), DraftingRouter(runner, luck, seed)
    router.run(list(plain))
    for request, known in zip(guessed, plain, strict=True):
        request.truth = known.generated
    runner.reset()
    speculator.run(list(guessed))
    for request, known in zip(guessed, plain, strict=True):
        assert request.generated == known.generated
        if request.details.get("ranks"):
            assert request.ranks == known.ranks
        if request.details.get("logprobs"):
            assert request.logprobs == near(runner, known.logprobs)
        assert equal_tops(runner, request, known)
    assert speculator.num_guessed > 50
    assert (speculator.num_right == 0) == (luck == 0)
    assert luck < 1 or speculator.num_right > 50


@pytest.mark.parametrize("left_to_shard", [0.5, 1.0])
def test_outputs_are_those_without_drafts_of_the_shard(host: HostModelRunner, left_to_shard: float) -> None:
    """Check the shard's drafts with and without the router's, and that the answer reports their number."""
    proposer, adapters, forward = ProposerInShard(), host.adapters, host.forward
    limits = RowLimits(192, 16, VOCAB_SIZE)
    table = RowTable(8, limits, torch.device("cpu"), adapters)
    builder = BatchBuilder(table, forward.attention, proposer)
    proposing = HostModelRunner(forward, builder, host._guides, host.info, adapters)
    seed = int(left_to_shard * 10)
    proposing.reset()
    plain, guessed = make_requests(seed), make_requests(seed)
    Router(proposing, seed).run(list(plain))
    for request, known in zip(guessed, plain, strict=True):
        request.truth = known.generated
    proposer.truths = [request.prompt + request.generated for request in plain]
    proposing.reset()
    speculator = DraftingRouter(proposing, 0.9, seed, left_to_shard)
    speculator.run(list(guessed))
    for request, known in zip(guessed, plain, strict=True):
        assert (request.generated, request.tops) == (known.generated, known.tops)
        if request.details.get("logprobs"):
            assert request.logprobs == known.logprobs
    assert speculator.num_proposed == proposer.num_proposed > 50
    assert 20 < speculator.num_right < proposer.num_proposed + speculator.num_guessed
    assert (speculator.num_guessed == 0) == (left_to_shard == 1)


def test_a_row_ends_where_it_would_have_ended(runner: ModelRunner) -> None:
    """Check any tokens as drafts; their leftovers in the cache must not affect other rows."""
    runner.reset()
    known = Request([5, 6, 7], 12, row=0)
    Router(runner).run([known])
    tokens = known.generated
    end = next(i for i, token in enumerate(tokens) if i > 2 and token not in tokens[:i])
    runner.reset()
    steps = Steps(runner.info.block_size, runner.info.num_blocks)
    opened = open_row(0, [5, 6, 7], max_new_tokens=12, eos=[tokens[end]])
    runner.launch(steps.step([(0, 0, 3)], [opened])).answer()
    response = runner.launch(steps.step([(0, 3, 4)], drafts={0: tokens[1:11]})).answer()
    assert integers(response.token_ids) == tokens[1 : end + 1]
    assert rows_of_tokens(response) == [(0, False)] * (end - 1) + [(0, True)]
    assert integers(response.rows) == [0]
    response = runner.launch(steps.step([(0, end + 3, end + 4)])).answer()
    assert not response.rows, "nothing more is computed for it"


def test_the_last_token_ends_the_row_behind_its_drafts(runner: ModelRunner) -> None:
    runner.reset()
    known = Request([9, 8], 6, row=0)
    Router(runner).run([known])
    steps = Steps(runner.info.block_size, runner.info.num_blocks)
    opened = open_row(0, [9, 8], max_new_tokens=6)
    runner.launch(steps.step([(0, 0, 2)], [opened])).answer()
    response = runner.launch(steps.step([(0, 2, 3)], drafts={0: known.generated[1:5]})).answer()
    assert integers(response.token_ids) == known.generated[1:]
    assert rows_of_tokens(response) == [(0, False)] * 4 + [(0, True)]


def poison(directory: Path, target: Path, token_id: int) -> None:
    """Write a copy of the model in which the embedding of that token is NaN."""
    for file in ("config.json", "tokenizer.json"):
        (target / file).write_bytes((directory / file).read_bytes())
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][token_id] = math.nan
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def test_errors_after_a_draft(
    runner: ModelRunner, load_runner: Callable[[ShardConfig], ModelRunner], directory: Path, tmp_path: Path
) -> None:
    """Check that the error comes after the tokens before it, and that a wrong draft causes no error."""
    runner.reset()
    known = Request([5, 6, 7], 12, row=0)
    Router(runner).run([known])
    tokens = known.generated
    place = next(i for i, token in enumerate(tokens) if i > 2 and token not in [5, 6, 7, *tokens[:i]])
    poison(directory, tmp_path, tokens[place])
    poisoned = load_runner(configure(tmp_path, speculate=6))
    steps = Steps(poisoned.info.block_size, poisoned.info.num_blocks)
    poisoned.launch(steps.step([(0, 0, 3)], [open_row(0, [5, 6, 7], max_new_tokens=12)])).answer()
    sampled, drafts, problems = tokens[:1], [tokens[place]] * 2, []
    while not problems:
        assert len(sampled) <= place + 1
        length = 3 + len(sampled)
        response = poisoned.launch(steps.step([(0, length - 1, length)], drafts={0: drafts})).answer()
        assert not (response.rows and response.errors)
        sampled += integers(response.token_ids)
        drafts, problems = tokens[len(sampled) : 11], [error.message for error in response.errors]
    assert sampled == tokens[: place + 1]
    assert "finite" in problems[0]
