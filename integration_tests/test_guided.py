"""Guided generations on a launched service: every kind, unary and streamed, beside other requests, resumed,
on two ranks, and beside texts that try to block the service."""

import json
import random
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from integration_tests.support.greedy_answers import Expected, Model, check, request
from integration_tests.support.service import Client, serve
from tests.support.streams import join_stream
from tgis.pb import generation_pb2 as pb

Decoding = pb.DecodingParameters
TIGHT = ["--block-size", "8", "--kv-cache-tokens", "320", "--max-step-tokens", "24", "--max-batch-size", "12"]
SERVICES = {
    "one rank": [],
    "two ranks, tight": [*TIGHT, "--num-shard", "2"],
    "lock step, tight": [*TIGHT, "--steps-in-flight", "1"],
}
WORDS = ["there was a little girl", "there was no bread", "the fox", "brown dog 🙂", 'quote " and \\', ""]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["girl", "fox"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PATTERN = r"(the |a )?[a-z]{3,8}( [a-z]{1,5}){0,3}\."


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags"]
        and value["name"] in ("girl", "fox")
        and 0 <= value["age"] <= 120
        and len(value["tags"]) <= 3
    )


@dataclass(frozen=True)
class Kind:
    decoding: pb.DecodingParameters
    accepts: Callable[[str], Any]
    """Check of the whole text."""


KINDS = {
    "schema": Kind(Decoding(json_schema=json.dumps(SCHEMA)), is_valid),
    "regex": Kind(Decoding(regex=PATTERN), re.compile(PATTERN).fullmatch),
    "choice": Kind(Decoding(choice=Decoding.StringChoices(choices=WORDS)), WORDS.__contains__),
    "lark": Kind(Decoding(grammar='start: "a" ("b" | "c")~2..5'), re.compile("a[bc]{2,5}").fullmatch),
    "gbnf": Kind(
        Decoding(grammar='root ::= ("fox" | "dog") [0-9] [0-9]?'), re.compile("(fox|dog)[0-9]{1,2}").fullmatch
    ),
}


# `make test` has guided texts in test_http_apis and test_tuning.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=SERVICES)
def client(request: pytest.FixtureRequest, model: Model) -> Iterator[Client]:
    yield from serve(model.directory, "--dtype", "float32", *SERVICES[request.param])


def parameters(decoding: pb.DecodingParameters, seed: int | None = None, **stopping: Any) -> pb.Parameters:
    sampled: dict[str, Any] = {}
    if seed is not None:
        sampled = {"method": pb.SAMPLE, "sampling": pb.SamplingParameters(seed=seed, temperature=1.3)}
    return pb.Parameters(
        decoding=decoding,
        stopping=pb.StoppingCriteria(**{"max_new_tokens": 90, **stopping}),
        response=pb.ResponseOptions(generated_tokens=True, token_logprobs=True, token_ranks=True),
        **sampled,
    )


def unary(client: Client, prompt: str, params: pb.Parameters) -> pb.GenerationResponse:
    message = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=prompt)], params=params)
    [response] = client.stub.Generate(message).responses
    return response


def streamed(client: Client, prompt: str, params: pb.Parameters) -> pb.GenerationResponse:
    message = pb.SingleGenerationRequest(request=pb.GenerationRequest(text=prompt), params=params)
    return join_stream(client.stub.GenerateStream(message))


def answer(response: pb.GenerationResponse) -> tuple[str, int, list[str]]:
    return response.text, response.stop_reason, [token.text for token in response.tokens]


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_unary_and_streamed(
    client: Client, answers: dict[tuple[str, int | None], Any], name: str, seed: int | None
) -> None:
    """The text is the same on every service, and matches the grammar."""
    kind = KINDS[name]
    params = parameters(kind.decoding, seed)
    response = unary(client, "Once upon a time", params)
    assert response.stop_reason == pb.EOS_TOKEN
    assert kind.accepts(response.text), response.text
    assert all(token.logprob > -100 for token in response.tokens), "of the distribution that was left"
    assert answer(streamed(client, "Once upon a time", params)) == answer(response)
    assert answers.setdefault((name, seed), answer(response)) == answer(response)


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, int | None], Any]:
    return {}


def test_any_json_begins_an_object(client: Client) -> None:
    response = unary(client, "The quick", parameters(Decoding(format=Decoding.JSON), max_new_tokens=40))
    assert response.text.startswith("{")
    if response.stop_reason == pb.EOS_TOKEN:
        assert isinstance(json.loads(response.text), dict)


def test_explicit_text_is_free(client: Client, model: Model) -> None:
    expected = model.expected[0]
    params = pb.Parameters(**request(expected), decoding=Decoding(format=Decoding.TEXT))
    check(expected, unary(client, expected.prompt, params))


def test_guided_and_free_requests_do_not_disturb_each_other(client: Client, model: Model) -> None:
    """Free tokens are transformers', guided ones equal those of the request alone; on small services, many
    requests are preempted and resumed."""
    r = random.Random(3)
    guided = [
        (name, prompt, parameters(kind.decoding, seed))
        for (name, kind), prompt in zip(
            [*KINDS.items()] * 2, (e.prompt for e in model.expected), strict=False
        )
        for seed in (None, 5)
    ]
    alone = [answer(unary(client, prompt, params)) for _, prompt, params in guided]

    def ask_free(expected: Expected) -> None:
        time.sleep(r.random() * 0.3)
        check(expected, unary(client, expected.prompt, pb.Parameters(**request(expected))))

    def ask_guided(item: tuple[str, str, pb.Parameters]) -> tuple[str, int, list[str]]:
        time.sleep(r.random() * 0.3)
        name, prompt, params = item
        response = r.choice((unary, streamed))(client, prompt, params)
        assert KINDS[name].accepts(response.text)
        return answer(response)

    with ThreadPoolExecutor(50) as threads:
        free = [threads.submit(ask_free, expected) for expected in model.expected]
        crowded = list(threads.map(ask_guided, guided))
        for task in free:
            task.result()
    assert crowded == alone


def test_a_batch_shares_its_grammar(client: Client) -> None:
    kind = KINDS["schema"]
    prompts = ["The quick", "brown fox", "jumps over"]
    message = pb.BatchedGenerationRequest(
        requests=[pb.GenerationRequest(text=prompt) for prompt in prompts], params=parameters(kind.decoding)
    )
    responses = client.stub.Generate(message).responses
    assert [answer(response) for response in responses] == [
        answer(unary(client, prompt, parameters(kind.decoding))) for prompt in prompts
    ]


def test_a_grammar_that_is_complete_ends_before_min_new_tokens(client: Client) -> None:
    for ask in (unary, streamed):
        response = ask(client, "Once", parameters(Decoding(regex="fox"), min_new_tokens=30))
        assert (response.text, response.stop_reason) == ("fox", pb.EOS_TOKEN)
        response = ask(
            client, "Once", parameters(Decoding(regex="[a-z]*"), min_new_tokens=30, max_new_tokens=35)
        )
        assert response.generated_token_count >= 30
        assert re.fullmatch("[a-z]*", response.text)


@pytest.mark.parametrize("include", [True, False])
def test_stop_sequences_end_guided_text(client: Client, include: bool) -> None:
    decoding = Decoding(regex="(quick brown fox )+")
    params = parameters(decoding, stop_sequences=["own f"], include_stop_sequence=include)
    for ask in (unary, streamed):
        response = ask(client, "Once", params)
        assert response.stop_reason == pb.STOP_SEQUENCE
        assert response.stop_sequence == "own f"
        assert response.text == ("quick brown f" if include else "quick br")


REFUSED = [
    (Decoding(regex="(a"), "regex is not valid: unclosed group"),
    (Decoding(json_schema="{"), "json_schema is not valid: "),
    (Decoding(grammar="root ::= x"), "grammar is not valid: Rule 'x' not found"),
    (Decoding(choice=Decoding.StringChoices(choices=["a"])), "Must provide at least two choices"),
    (Decoding(regex="a" * 70_000), "regex must have at most 65536 UTF8 bytes"),
]


def test_refused_grammars_are_invalid_arguments(client: Client) -> None:
    for decoding, text in REFUSED:
        for ask in (unary, streamed):
            with pytest.raises(grpc.RpcError) as error:
                ask(client, "Once", parameters(decoding))
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.value.details().startswith(text)


def test_a_grammar_that_explodes_on_the_way_is_the_requests_fault(client: Client) -> None:
    """It compiles, but a later mask is too expensive."""
    params = parameters(Decoding(regex="((a{1,1000}){1,1000}){1,1000}"))
    params.stopping.max_new_tokens = params.stopping.min_new_tokens = 150
    with pytest.raises(grpc.RpcError) as error:
        unary(client, "Once", params)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    text = "regex cannot be followed: it is too complex, or no token of this model fits it"
    assert error.value.details() == text


def hostile(i: int) -> pb.DecodingParameters:
    """Return different texts that compile slowly, crash the compiler, or make every token expensive."""
    slow = {"type": "integer", "minimum": -(10**17), "maximum": 10**17 + i, "multipleOf": 999983}
    rules = "\n".join(f'a{j}: "x{j}" a{j + 1}' for j in range(3000))
    return [
        Decoding(json_schema=json.dumps(slow)),
        Decoding(grammar=f'start: a0\n{rules}\na3000: "x{i}"'),
        Decoding(regex=f"((a{{1,1000}}){{1,1000}}){{1,{1000 + i}}}"),
        Decoding(json_schema=json.dumps({"properties": {f"p{i}-{j}": {} for j in range(1500)}})),
        Decoding(regex=f"(.*a){{{20 + i}}}"),
    ][i % 5]


def test_hostile_grammars_do_not_hold_up_a_free_stream(client: Client, model: Model) -> None:
    gaps: list[float] = []

    def stream() -> None:
        params = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=200, min_new_tokens=200))
        message = pb.SingleGenerationRequest(request=pb.GenerationRequest(text="Once"), params=params)
        message.params.response.generated_tokens = True
        last = None
        for part in client.stub.GenerateStream(message):
            now = time.monotonic()
            if last is not None and part.tokens:
                gaps.append(now - last)
            last = now

    def ask(i: int) -> str:
        try:
            unary(client, "Once", parameters(hostile(i)))
        except grpc.RpcError as error:
            return error.code().name
        return "OK"

    attackers = ThreadPoolExecutor(10)
    stop = threading.Event()
    codes = []

    def attack(start: int) -> None:
        for i in range(start, 10_000, 10):
            if stop.is_set():
                return
            codes.append(ask(i))

    tasks = [attackers.submit(attack, start) for start in range(10)]
    for _ in range(3):
        stream()
    stop.set()
    for task in tasks:
        task.result()
    attackers.shutdown()
    assert set(codes) <= {"OK", "INVALID_ARGUMENT"}
    assert "INVALID_ARGUMENT" in codes
    assert max(gaps) < 2  # otherwise it was blocked; tests do not check times beyond that
    expected = model.expected[1]
    check(expected, unary(client, expected.prompt, pb.Parameters(**request(expected))))


def test_the_tight_services_are_tight(client: Client, request: pytest.FixtureRequest) -> None:
    """Otherwise nothing above was resumed; this test runs last."""
    with urllib.request.urlopen(client.service.http + "/metrics", timeout=10) as response:
        metrics = response.read().decode()
    match = re.search(r"^tgi_preemptions (\S+)", metrics, re.MULTILINE)
    is_tight = request.node.callspec.params["client"] != "one rank"
    assert (match is not None and float(match[1]) > 0) == is_tight
    assert not re.search(r"^tgi_shard_restarts(_total)? [1-9]", metrics, re.MULTILINE)
