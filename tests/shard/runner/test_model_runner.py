"""Check a whole engine, driven by the router's messages, against transformers on the same checkpoint."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.shard.driver import Request, Router, configure, opening, prompts
from tests.support.shard.messages import GREEDY, SAMPLE, Steps, floats, integers, open_row
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.load import load

EOS = 2


@pytest.fixture(scope="module")
def model_path(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("grouped_queries")


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def loaded(model_path: Path) -> ModelRunner:
    return load(configure(model_path))


@pytest.fixture
def runner(loaded: ModelRunner) -> ModelRunner:
    loaded.reset()
    return loaded


def generate(oracle: Any, request: Request, **options: Any) -> list[int]:
    ids = torch.tensor([request.prompt])
    out = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        eos_token_id=request.eos or None,
        pad_token_id=0,
        **options,
    )
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_greedy_tokens_are_those_of_transformers(runner: ModelRunner, oracle: Any, depth: int) -> None:
    """Check random chunks, reused rows, and steps with rows that have ended meanwhile."""
    requests = [
        Request(prompt, 5 + i, eos=list(range(20 * (i % 2)))) for i, prompt in enumerate(prompts(1, 14))
    ]
    Router(runner, seed=depth, depth=depth).run(list(requests))
    assert any(len(request.generated) < request.max_new_tokens for request in requests)
    for request in requests:
        assert request.ended
        assert request.generated == generate(oracle, request)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.6}, {"repetition_penalty": 1.6}),
        ({"min_new_tokens": 6}, {"min_new_tokens": 6}),
        (
            {"length_penalty_start": 3, "length_penalty_factor": 1.7},
            {"exponential_decay_length_penalty": (3, 1.7)},
        ),
    ],
)
def test_penalties_are_those_of_transformers(
    runner: ModelRunner, oracle: Any, ours: Any, theirs: Any
) -> None:
    eos = list(range(0, 99, 6))
    requests = [Request(prompt, 14, eos, {**GREEDY, **ours}) for prompt in prompts(2, 8, longest=20)]
    plain = [generate(oracle, request) for request in requests]
    Router(runner).run(list(requests))
    for request in requests:
        assert request.generated == generate(oracle, request, **theirs)
    assert plain != [request.generated for request in requests], "the penalty makes a difference"


def sampled(seed: int) -> list[Request]:
    settings = [
        {},
        {"top_k": 5},
        {"top_p": 0.8},
        {"typical_p": 0.7},
        {"temperature": 0.6, "repetition_penalty": 1.3},
    ]
    return [
        Request(prompt, 16, [EOS], {**SAMPLE, "seed": seed + i, **settings[i % 5]})
        for i, prompt in enumerate(prompts(seed, 10, longest=25))
    ]


def test_sampled_tokens_do_not_depend_on_company_or_interruption(runner: ModelRunner) -> None:
    together = sampled(3)
    Router(runner, seed=1).run(list(together))
    alone = sampled(3)
    for request in alone:
        Router(runner, depth=1, whole=True).run([request])
    assert [request.generated for request in together] == [request.generated for request in alone]
    assert len({tuple(request.generated) for request in alone}) == len(alone)
    stopped = sampled(3)
    Router(runner, seed=2, whole=True).run(list(stopped), stop_after=6)
    assert {0 < len(request.generated) < 16 for request in stopped} == {True, False}
    runner.reset()
    Router(runner, seed=3).run([request for request in stopped if not request.ended])
    assert [request.generated for request in stopped] == [request.generated for request in alone]


def test_frequencies_are_those_of_the_model(runner: ModelRunner, oracle: Any) -> None:
    prompt = prompts(4, 1)[0]
    requests = [Request(prompt, 1, [], {**SAMPLE, "seed": seed, "temperature": 2.0}) for seed in range(400)]
    Router(runner, whole=True).run(list(requests))
    with torch.inference_mode():
        probabilities = (oracle(torch.tensor([prompt])).logits[0, -1] / 2).softmax(-1)
    likely = probabilities.argmax().item()
    share = sum(request.generated == [likely] for request in requests) / 400
    p = probabilities[likely].item()
    assert share == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 400))


def test_blocks_of_another_row_are_read(runner: ModelRunner, oracle: Any) -> None:
    size = runner.info.block_size
    prompt = prompts(9, 1)[0][:1] * 3 + list(range(10, 10 + 2 * size))
    first, second = Request([*prompt, 7], 5), Request([*prompt, 8, 9], 5)
    steps = Steps(size, runner.info.num_blocks)
    first.row, second.row = 0, 1
    runner.launch(steps.step([(0, 0, len(first.prompt))], [opening(first)])).answer()
    shared = steps.blocks[0][:2]
    length = len(second.prompt)
    request = steps.step([(1, 2 * size, length)], [opening(second)])
    table = shared + steps.blocks[1][2:]
    request.new_blocks = b"".join(block.to_bytes(4, "little") for block in table)
    response = runner.launch(request).answer()
    assert integers(response.token_ids) == generate(oracle, second)[:1]


def test_a_row_that_cannot_be_served_fails_alone(runner: ModelRunner, oracle: Any) -> None:
    steps, good = Steps(runner.info.block_size, runner.info.num_blocks), Request([5, 6, 7], row=1)
    response = runner.launch(
        steps.step([(0, 0, 2), (1, 0, 3)], [open_row(0, [5, 99]), opening(good)])
    ).answer()
    assert [(error.row, error.message) for error in response.errors] == [
        (0, "a token id is not below the model's vocabulary size 99")
    ]
    assert integers(response.rows) == [1]
    assert integers(response.token_ids) == generate(oracle, good)[:1]
    response = runner.launch(steps.step([(0, 2, 3), (1, 3, 4)])).answer()
    assert (integers(response.rows), list(response.errors)) == ([1], [])


@pytest.fixture(scope="module")
def poisoned(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """Load a copy of the model in which the embedding of token 50 is NaN."""
    path = tmp_path_factory.mktemp("poisoned")
    (path / "config.json").write_bytes((model_path / "config.json").read_bytes())
    tensors = load_file(model_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][50] = math.nan
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return load(configure(path))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLE, {**SAMPLE, "top_p": 0.5}])
def test_scores_that_are_no_numbers_end_their_row(poisoned: ModelRunner, oracle: Any, sampling: Any) -> None:
    poisoned.reset()
    steps = Steps(poisoned.info.block_size, poisoned.info.num_blocks)
    good = Request([5, 6, 7], row=1, details={"logprobs": True, "top_n": 2})
    opened = [open_row(0, [4, 50], sampling=sampling, logprobs=True, input_tokens=True), opening(good)]
    response = poisoned.launch(steps.step([(0, 0, 2), (1, 0, 3)], opened)).answer()
    assert [error.row for error in response.errors] == [0]
    assert "finite" in response.errors[0].message
    expected = generate(oracle, good)
    assert (integers(response.rows), integers(response.token_ids)) == ([1], expected[:1])
    assert floats(response.logprobs)[0] < 0
    response = poisoned.launch(steps.step([(0, 2, 3), (1, 3, 4)])).answer()
    assert (integers(response.rows), integers(response.token_ids)) == ([1], expected[1:2])
    after = Request([8, 9], row=0)
    request = steps.step([(0, 0, 2)], [opening(after)], [0])
    response = poisoned.launch(request).answer()
    assert integers(response.token_ids) == generate(oracle, after)[:1], "blocks of the bad row do no harm"


def test_rows_are_forgotten_when_a_stream_begins(runner: ModelRunner) -> None:
    steps = Steps(runner.info.block_size, runner.info.num_blocks)
    runner.launch(steps.step([(0, 0, 2)], [open_row(0, [5, 6])])).answer()
    runner.reset()
    with pytest.raises(AssertionError, match="not open"):
        runner.launch(steps.step([(0, 2, 3)])).answer()
