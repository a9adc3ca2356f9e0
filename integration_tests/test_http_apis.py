"""The HTTP APIs of a launched service: the `openai` package as `make clients` runs it, DJL's example bodies,
and equal tokens through all APIs and gRPC: alone, among other requests, unary and streamed, with all
parameters that an API shares with gRPC."""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import pytest

from integration_tests.clients import use_openai
from integration_tests.clients.expectations import Check, Served
from integration_tests.clients.lmi_examples import EXAMPLES, Example, Reply
from integration_tests.clients.served import MAX_SEQUENCE_LENGTH, launch_served
from integration_tests.support.api_requests import Answer, Apis, Fields
from integration_tests.support.inputs_requests import UNTOLD, InputsApis
from integration_tests.support.service import Client
from tests.support.http_exchange import exchange
from tgis.process.run_directory import running_urls

# Small enough that prompts are chunked, that all requests do not fit into the cache, and that prefixes are
# shared.
TIGHT = ["--block-size", "8", "--kv-cache-tokens", "640", "--max-step-tokens", "48", "--max-batch-size", "12"]
SHORT = 512  # for which the cache has room
SERVICES = {"one rank": [], "two ranks, tight": [*TIGHT, "--num-shard", "2"], "one rank, tight": TIGHT}
SERVED = [
    pytest.param(name, marks=() if name == "one rank, tight" else pytest.mark.slow) for name in SERVICES
]
SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["fox", "dog"]},
        "legs": {"type": "integer", "minimum": 2, "maximum": 4},
    },
    "required": ["animal", "legs"],
    "additionalProperties": False,
}
CHOICES: list[dict[str, object]] = [
    {"top_k": 40},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"logit_bias": {"40": 2.5, "77": -100, "120": 0.75}},
    {"min_tokens": 20},
    {"stop_token_ids": [*range(300, 340)]},
    {"ignore_eos": True},
    {"stop": ["e", "o q"]},
    {"stop": ["le"], "include_stop_str_in_output": True},
    {"cache_salt": "salt"},
    {"truncate_prompt_tokens": 4},
    {"top_k": 20, "top_p": 0.9, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {"structured_outputs": {"regex": "[a-z]{4,9}( [a-z]{2,5}){2}"}},
    {"structured_outputs": {"choice": ["a quick fox", "a lazy dog", "a little girl"]}},
    {"structured_outputs": {"json": SCHEMA}},
]


class Ask(NamedTuple):
    prompt: str | list[int]
    text: str
    """Text of the prompt, for APIs that accept no ids."""
    fields: Fields

    def through(self, apis: Apis, inputs_apis: InputsApis) -> dict[str, Callable[[], Answer]]:
        """Return all ways in which it can be sent."""
        ways = {name: partial(way, self.prompt, self.fields) for name, way in apis.ways.items()}
        others = inputs_apis.ways(self.fields)
        return ways | {name: partial(way, self.text, self.fields) for name, way in others.items()}


@pytest.fixture(scope="module", params=SERVED)
def launched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, Client]]:
    flags, directory = SERVICES[request.param], tmp_path_factory.mktemp("served")
    length = SHORT if "--kv-cache-tokens" in flags else MAX_SEQUENCE_LENGTH
    flags = [*flags, "--generation-config", "none"]  # fmaas's API has other defaults than the model's authors
    with launch_served(directory, *flags, max_sequence_length=length) as launched:
        yield launched


@pytest.fixture(scope="module")
def served(launched: tuple[Served, Client]) -> Served:
    return launched[0]


@pytest.fixture(scope="module")
def apis(launched: tuple[Served, Client]) -> Apis:
    return Apis(*launched)


@pytest.fixture(scope="module")
def inputs_apis(served: Served) -> InputsApis:
    return InputsApis(served)


@pytest.mark.parametrize("check", use_openai.CHECKS, ids=lambda check: check.__name__)
def test_openai_package(check: Check, served: Served) -> None:
    check(served)


@pytest.mark.slow
@pytest.mark.parametrize("launched", ["one rank"], indirect=True)
@pytest.mark.parametrize("check", use_openai.LONG_CHECKS, ids=lambda check: check.__name__)
def test_openai_package_with_long_prompts(check: Check, served: Served) -> None:
    check(served)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.__name__)
def test_examples_of_djl(example: Example, served: Served) -> None:
    def invoke(body: Mapping[str, Any]) -> Reply:
        answer = exchange(f"{served.root}/invocations", body, served.headers)
        return Reply(answer.status, answer.headers["content-type"], answer.body)

    example(served, invoke)


def sampled(served: Served) -> list[Ask]:
    """Each parameter alone, then several at random; prompts as text and as ids."""
    r = random.Random(11)
    several = [
        {key: value for i in r.sample(range(10), 4) for key, value in CHOICES[i].items()} for _ in range(6)
    ]
    asks: list[Ask] = []
    for i, more in enumerate([{}, *CHOICES, *several]):
        asked = served.completions[i % len(served.completions)]
        fields = {"temperature": 0.6 + i / 40, "seed": 2**63 + i, "max_tokens": 30, **more}
        # The special tokens that begin a text are kept when it is truncated; those of ids are not.
        is_text = "truncate_prompt_tokens" in more or i % 2 == 0
        asks.append(Ask(asked.prompt if is_text else asked.ids, asked.prompt, fields))
    return asks


def test_top_finds_the_service(served: Served) -> None:
    assert served.root in running_urls()


def test_all_apis_give_the_same_tokens(served: Served, apis: Apis, inputs_apis: InputsApis) -> None:
    asks = sampled(served)
    alone = [apis.generate(ask.prompt, ask.fields) for ask in asks]
    assert len({answer.text for answer in alone}) > len(asks) - 4
    tasks = []
    for i, (ask, wanted) in enumerate(zip(asks, alone, strict=True)):
        ways = ask.through(apis, inputs_apis)
        tasks += [(name, way, ask, wanted) for name, way in ways.items()]
        name = [*ways][i % len(ways)]
        assert_same(ask, f"{name}, alone", ways[name](), wanted)
        if "structured_outputs" in ask.fields and wanted.finish_reason == "stop":
            assert is_guided_by(ask.fields["structured_outputs"], wanted.text), (ask, wanted)
    assert len(tasks) > 6 * len(asks), "TGI's and LMI's API can ask most of it"
    random.Random(1).shuffle(tasks)
    with ThreadPoolExecutor(24) as threads:
        answers = threads.map(lambda task: task[1](), tasks)
        for (name, _, ask, wanted), answer in zip(tasks, answers, strict=True):
            assert_same(ask, f"{name}, in a crowd", answer, wanted)


def is_guided_by(guided: Fields, text: str) -> bool:
    match guided:
        case {"regex": pattern}:
            return re.fullmatch(pattern, text) is not None
        case {"choice": choices}:
            return text in choices
        case _:
            return set(json.loads(text)) == set(SCHEMA["properties"])


def assert_same(ask: Ask, how: str, given: Answer, wanted: Answer) -> None:
    if given.num_input_tokens == UNTOLD:
        given = given._replace(num_input_tokens=wanted.num_input_tokens)
    assert given[:4] == wanted[:4], (how, ask, given, wanted)


def test_all_apis_score_the_same(served: Served, apis: Apis, inputs_apis: InputsApis) -> None:
    """Log-probabilities are compared if nothing changes the model's distribution, because some APIs report
    them before changes."""
    for i, asked in enumerate(served.completions[:6]):
        fields = {"temperature": i % 2, "seed": i, "max_tokens": 12, "logprobs": 0, "ignore_eos": True}
        wanted = apis.generate(asked.ids, fields)
        for answer in (apis.complete(asked.ids, fields), apis.complete_stream(asked.ids, fields)):
            assert answer[:4] == wanted[:4]
            assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
        fields = {name: fields[name] for name in ("temperature", "seed", "max_tokens")}
        wanted = apis.generate(asked.ids, {**fields, "logprobs": 0})
        ways = inputs_apis.ways(fields)
        assert len(ways) == 5
        for way in ways.values():
            answer = way(asked.prompt, fields)
            assert (answer.text, answer.num_tokens) == (wanted.text, wanted.num_tokens)
            assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
        fields = {**fields, "logprobs": 0, "ignore_eos": True}
        wanted = apis.generate(asked.ids, fields)
        echoed = {**fields, "echo": True}
        wanted, answer = apis.generate(asked.ids, echoed), apis.complete(asked.ids, echoed)
        assert answer.prompt_logprobs == pytest.approx(wanted.prompt_logprobs, abs=1e-5)
        assert answer.prompt_logprobs == pytest.approx(asked.prompt_logprobs, abs=1e-3)
        assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)


def test_chats_are_prompts_rendered(served: Served, apis: Apis) -> None:
    """transformers renders the chat; the ids of that text give the same result over gRPC as the chat over
    HTTP."""

    def ask(i: int) -> None:
        chat = served.chats[i % len(served.chats)]
        fields = {"temperature": (i % 3) * 0.5, "seed": i, "max_tokens": 24, **CHOICES[i % 14]}
        fields.pop("truncate_prompt_tokens", None)
        wanted = apis.generate(chat.answer.ids, fields)
        assert apis.chat(chat.messages, fields)[:4] == wanted[:4], (fields, chat.prompt)
        assert apis.chat_stream(chat.messages, fields)[:4] == wanted[:4], (fields, chat.prompt)

    for i in range(4):
        ask(i)
    with ThreadPoolExecutor(14) as threads:
        list(threads.map(ask, range(4, 32)))
