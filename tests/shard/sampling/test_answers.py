"""Check whole answers of a model with random weights.

Required tool calls parse and match their schemas, budgets hold, and a resumed answer continues as before."""

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.support.answer_cases import END_THINK, FORMATS, MARKS, fits, reasoning, split_reasoning
from tests.support.shard.checkpoints import write_llama
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.messages import SAMPLE, make_bias
from tests.support.tokenizers.trained import write_byte_level
from tgis.router.grammar.answer_rules import AnswerRules
from tgis.router.grammar.worker import FREE, Compiler
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.load import load

VOCAB_SIZE, EOS = 420, 1
MAX_NEW_TOKENS = 120
BUDGET = 7


class Model:
    """A model with random weights and a tokenizer whose markers are tokens, which may be special."""

    def __init__(self, directory: Path, are_special: bool) -> None:
        write_llama(directory, vocab_size=VOCAB_SIZE, eos_token_id=EOS)
        self.tokenizer: Tokenizer = write_byte_level(directory, 400)
        self.tokenizer.add_tokens([AddedToken(mark, special=are_special, normalized=False) for mark in MARKS])
        self.tokenizer.save(str(directory / "tokenizer.json"))
        self.runner: ModelRunner = load(configure(directory))

    def run(self, requests: list[Request], seed: int = 0) -> None:
        self.runner.reset()
        Router(self.runner, seed=seed).run(requests)

    def text(self, token_ids: list[int]) -> str:
        assert token_ids[-1] == EOS
        text: str = self.tokenizer.decode(token_ids[:-1], skip_special_tokens=False)
        return text


@pytest.fixture(
    scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["added", "special"]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"), request.param)


def make_requests(model: Model, name: str, count: int, is_required: bool, thinks: bool) -> list[Request]:
    """Return sampled requests, whose reasoning has a budget if the model thinks."""
    r, form = random.Random(name), FORMATS[name]
    token_id = model.tokenizer.token_to_id
    rule = reasoning(token_id, True, BUDGET) if thinks else None
    requests = []
    for seed in range(count):
        rules = AnswerRules(rule, form.rules(is_required, token_id, seed % 3 == 0))
        # A model with random weights would seldom start a call.
        bias = {} if is_required else make_bias({token_id(form.trigger): 6.0})
        sampling = {**SAMPLE, "seed": seed, "temperature": r.choice([0.5, 1.0, 2.0]), **bias}
        prompt = [r.randrange(2, 380) for _ in range(r.randint(1, 20))]
        grammar = Compiler().compile(FREE, "", rules)
        requests.append(Request(prompt, MAX_NEW_TOKENS, [EOS], sampling, {}, grammar))
    return requests


def read(model: Model, name: str, request: Request, thinks: bool) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text before the calls and the calls, after checking the reasoning budget."""
    text = model.text(request.generated)
    if thinks:
        assert request.generated.index(model.tokenizer.token_to_id(END_THINK)) <= BUDGET
        _, text = split_reasoning(text, True)
    return FORMATS[name].read(text)


# The other cases run in `make test-all`.
FAST = ("tags", "bare")
forms = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FORMATS]
)


@forms
@pytest.mark.parametrize("thinks", [False, True])
def test_required_calls_of_random_weights_parse_and_fit(model: Model, name: str, thinks: bool) -> None:
    requests = make_requests(model, name, 12, True, thinks)
    model.run(requests[:])
    ended = [request for request in requests if request.generated[-1] == EOS]
    for request in ended:
        content, calls = read(model, name, request, thinks)
        assert not content
        assert calls
        assert all(fits(function, arguments) for function, arguments in calls), calls
    assert len(ended) > 3
    assert all(len(each.generated) == MAX_NEW_TOKENS for each in requests if each not in ended)


@pytest.mark.parametrize(
    "name", ["tags", *(pytest.param(name, marks=pytest.mark.slow) for name in ("array", "names", "section"))]
)
def test_a_call_that_has_begun_parses_and_fits(model: Model, name: str) -> None:
    """Check a call that is resumed after a shard was lost, with the tokens generated so far."""
    requests = make_requests(model, name, 12, False, True)
    model.run(requests[:])
    num_calls = 0
    for request in requests:
        if request.generated[-1] == EOS:
            _, calls = read(model, name, request, True)
            assert all(fits(function, arguments) for function, arguments in calls), calls
            num_calls += len(calls)
    assert num_calls > 3
    r = random.Random(name)
    resumed = make_requests(model, name, 12, False, True)
    for request, before in zip(resumed, requests, strict=True):
        request.generated = before.generated[: r.randrange(len(before.generated))]
    model.run(resumed[:], seed=1)
    assert [each.generated for each in resumed] == [each.generated for each in requests]
