"""OpenAI's API of a launched service: the `openai` package as `make clients` runs it, and the same tokens
through HTTP as through gRPC: alone, in a crowd, unary and streamed, with every parameter that both have."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration_tests.clients import use_openai
from integration_tests.clients.expectations import Check, Served
from integration_tests.clients.served import MAX_SEQUENCE_LENGTH, launch_served
from integration_tests.support.door_requests import Answer, Doors, Fields
from integration_tests.support.service import Client

# Small enough that prompts are cut, that a crowd does not fit into the cache, and that prefixes are shared.
TIGHT = ["--block-size", "8", "--kv-cache-tokens", "640", "--max-step-tokens", "48", "--max-batch-size", "12"]
SHORT = 512  # that cache has room for it
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
    {"structured_outputs": {"regex": "[a-z]{4,9}( [a-z]{2,5}){2}"}},
    {"structured_outputs": {"choice": ["a quick fox", "a lazy dog", "a little girl"]}},
    {"structured_outputs": {"json": SCHEMA}},
]

Ask = tuple[str | list[int], Fields]


@pytest.fixture(scope="module", params=SERVED)
def launched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, Client]]:
    flags, directory = SERVICES[request.param], tmp_path_factory.mktemp("served")
    length = SHORT if "--kv-cache-tokens" in flags else MAX_SEQUENCE_LENGTH
    with launch_served(directory, *flags, max_sequence_length=length) as launched:
        yield launched


@pytest.fixture(scope="module")
def served(launched: tuple[Served, Client]) -> Served:
    return launched[0]


@pytest.fixture(scope="module")
def doors(launched: tuple[Served, Client]) -> Doors:
    return Doors(*launched)


@pytest.mark.parametrize("check", use_openai.CHECKS, ids=lambda check: check.__name__)
def test_openai_package(check: Check, served: Served) -> None:
    check(served)


@pytest.mark.slow
@pytest.mark.parametrize("launched", ["one rank"], indirect=True)
@pytest.mark.parametrize("check", use_openai.LONG_CHECKS, ids=lambda check: check.__name__)
def test_openai_package_with_long_prompts(check: Check, served: Served) -> None:
    check(served)


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
        # The special tokens that begin a text are put back when it is truncated, and those of ids are not.
        is_text = "truncate_prompt_tokens" in more or i % 2 == 0
        asks.append((asked.prompt if is_text else asked.ids, fields))
    return asks


def test_both_doors_give_the_same_tokens(served: Served, doors: Doors) -> None:
    asks = sampled(served)
    alone = [doors.generate(*ask) for ask in asks]
    assert len({answer.text for answer in alone}) > len(asks) - 4
    for ask, wanted in zip(asks, alone, strict=True):
        assert_same(ask, "HTTP", doors.complete(*ask), wanted)
        assert_same(ask, "HTTP, streamed", doors.complete_stream(*ask), wanted)
    tasks = [(name, how, i) for name, how in doors.ways.items() for i in range(len(asks))]
    random.Random(1).shuffle(tasks)
    with ThreadPoolExecutor(24) as threads:
        answers = threads.map(lambda task: task[1](*asks[task[2]]), tasks)
        for (name, _, i), answer in zip(tasks, answers, strict=True):
            assert_same(asks[i], f"{name}, in a crowd", answer, alone[i])


def assert_same(ask: Ask, how: str, given: Answer, wanted: Answer) -> None:
    assert given[:4] == wanted[:4], (how, ask, given, wanted)


def test_both_doors_score_the_same(served: Served, doors: Doors) -> None:
    """Where nothing changes the model's distribution: only HTTP tells of it before it is changed."""
    for i, asked in enumerate(served.completions[:6]):
        fields = {"temperature": i % 2, "seed": i, "max_tokens": 12, "logprobs": 0, "ignore_eos": True}
        wanted = doors.generate(asked.ids, fields)
        for answer in (doors.complete(asked.ids, fields), doors.complete_stream(asked.ids, fields)):
            assert answer[:4] == wanted[:4]
            assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
        echoed = {**fields, "echo": True}
        wanted, answer = doors.generate(asked.ids, echoed), doors.complete(asked.ids, echoed)
        assert answer.prompt_logprobs == pytest.approx(wanted.prompt_logprobs, abs=1e-5)
        assert answer.prompt_logprobs == pytest.approx(asked.prompt_logprobs, abs=1e-3)
        assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)


def test_chats_are_prompts_rendered(served: Served, doors: Doors) -> None:
    """transformers renders the chat; the ids of that text through gRPC give what the chat gives over HTTP."""

    def ask(i: int) -> None:
        chat = served.chats[i % len(served.chats)]
        fields = {"temperature": (i % 3) * 0.5, "seed": i, "max_tokens": 24, **CHOICES[i % 14]}
        fields.pop("truncate_prompt_tokens", None)
        wanted = doors.generate(chat.answer.ids, fields)
        assert doors.chat(chat.messages, fields)[:4] == wanted[:4], (fields, chat.prompt)
        assert doors.chat_stream(chat.messages, fields)[:4] == wanted[:4], (fields, chat.prompt)

    for i in range(4):
        ask(i)
    with ThreadPoolExecutor(14) as threads:
        list(threads.map(ask, range(4, 32)))
