"""Tests the bounds of JSON bodies against the values that Python's own parser builds."""

import asyncio
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_exchange import exchange
from tests.support.router.served_chats import open_chats
from tgis.router.api.http import json_bodies, json_structure
from tgis.router.api.http.json_bodies import LONG_BYTES, BodyReader, Turns
from tgis.router.api.http.json_structure import LIGHT, BodyLimits, Weight, check_structure
from tgis.router.errors import OverloadedError, RequestError

pytestmark = pytest.mark.usefixtures("steady_clock")

LIMITS = BodyLimits(max_sequence_length=2048)
MODEL_OF_LONG_TEXTS = BodyLimits(max_sequence_length=1 << 17)
TEXTS = ("", "a", ",[]{}", '"', "\\", '\\"', "\\\\", '["a","b"]', "é\n", "\\u0022")


HELLO = {"role": "user", "content": "a"}


def calling(arguments: str) -> dict[str, Any]:
    """Return a message that calls a tool."""
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def weigh(value: Any) -> Weight:
    """Count the lists and values of a parsed body, with objects as lists of pairs."""
    if not isinstance(value, list | dict):
        return LIGHT
    items = list(value.values()) if isinstance(value, dict) else value
    inner = [weigh(item) for item in items]
    num_lists = 1 + sum(each.num_lists for each in inner)
    return Weight(num_lists, 1 + max(len(items) - 1, 0) + sum(each.num_values for each in inner))


def make(r: random.Random, depth: int = 0) -> Any:
    kind = r.random() if depth < 6 else 1.0
    if kind < 0.35:
        return [make(r, depth + 1) for _ in range(r.choice((0, 1, 2, 5, 20)))]
    if kind < 0.6:
        names = [r.choice(TEXTS) + str(number) for number in range(r.choice((0, 1, 2, 5)))]
        return {name: make(r, depth + 1) for name in names}
    return r.choice((1, -2.5, None, True, *TEXTS))


def write(value: Any, r: random.Random) -> bytes:
    separators = r.choice(((",", ":"), (" , ", " : "), (",\n ", ":\t")))
    return json.dumps(value, ensure_ascii=r.random() < 0.5, separators=separators).encode()


def refusal(body: bytes, limits: BodyLimits = LIMITS) -> str:
    with pytest.raises(RequestError) as caught:
        check_structure(body, limits)
    return str(caught.value)


def test_lists_and_values_are_those_that_a_parser_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_structure, "FREE_VALUES", 8)
    r, num_large = random.Random(0), 0
    for _ in range(250):
        value = {r.choice(TEXTS) + str(number): make(r) for number in range(r.randint(0, 6))}
        expected = weigh(value)
        structure = check_structure(write(value, r), LIMITS)
        assert structure in ((expected, LIGHT) if expected.num_values <= 8 else (expected,))
        num_large += expected.num_values > 8
    assert num_large > 35


def test_a_field_has_its_own_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the fields around it nor the spelling of its name matter."""
    monkeypatch.setattr(json_structure, "FREE_VALUES", 8)
    monkeypatch.setattr(json_structure, "SHORT_LIST", 30)
    r = random.Random(1)
    for _ in range(100):
        others = {r.choice(TEXTS) + str(number): make(r) for number in range(4)}
        num = r.choice((5, 29, 30, 31, 32, 60))
        value = {**dict(list(others.items())[:2]), "stop": [r.choice(TEXTS)] * num, **others}
        body = write(value, r).replace(b'"stop"', r.choice((b'"stop"', b'"\\u0073top"')))
        if num <= 30:
            check_structure(body, LIMITS)
        else:
            assert refusal(body) == "stop has more than 30 values"


@pytest.mark.parametrize(
    ("head", "item", "tail", "message"),
    [
        ('{"prompt":[', "[1]", "]}", "the body has more than 32768 lists and objects"),
        ('{"prompt":[', "1", "]}", "prompt has more than 65536 values"),
        ('{"prompt":[', '"a"', "]}", "prompt has more than 65536 values"),
        ('{"chat_template_kwargs":{"x":[', "[]", "]}}", "the body has more than 32768 lists and objects"),
        ('{"chat_template_kwargs":{"x":[', "0", "]}}", "chat_template_kwargs has more than 262144 values"),
        (
            '{"messages":[',
            '{"role":"user","content":"a"}',
            "]}",
            "the body has more than 32768 lists and objects",
        ),
        ('{"parameters":{"stop":[', '"a"', "]}}", "parameters has more than 32768 values"),
        ('{"logit_bias":{', '"1":1', "}}", "logit_bias has more than 4096 values"),
        ('{"inputs":[', '"a"', "]}", "inputs has more than 4096 values"),
        ('{"unknown":[', "1", "]}", "unknown has more than 262144 values"),
        ('{"a b":[', "1", "]}", "a field has more than 262144 values"),
        ("[", "1", "]", "the body has more than 262144 values"),
        ('{"prompt":[', "[1]", "", "the body has more than 32768 lists and objects"),
        ('{"a":["\\"",', '"\\\\",{}', "]}", "the body has more than 32768 lists and objects"),
        ("{", '"stop":[1]', "}", "the body has more than 32768 lists and objects"),
        ("{", '"stop":1', "}", "the body has more than 262144 values"),
    ],
)
def test_many_small_elements_are_refused(head: str, item: str, tail: str, message: str) -> None:
    num = ((4 << 20) - len(head + tail)) // (len(item) + 1)
    assert refusal((head + ",".join([item] * num) + tail).encode()) == message


def test_lists_of_token_ids_are_as_many_as_inputs() -> None:
    check_structure(json.dumps({"prompt": [[1] * 20] * 128}).encode(), LIMITS)
    assert refusal(json.dumps({"prompt": [[1] * 20] * 129}).encode()) == "prompt must have at most 128 lists"


def schema(num_properties: int) -> dict[str, Any]:
    one = {"type": "object", "properties": {"a": {"type": "string", "enum": list(map(str, range(20)))}}}
    return {"type": "object", "properties": {f"p{number}": one for number in range(num_properties)}}


@pytest.mark.parametrize(
    ("body", "limits"),
    [
        ({"prompt": 'one, two, [three], {four}, "five", \\, ' * 90_000}, LIMITS),
        ({"prompt": ["a, b" * 5_000] * 128}, LIMITS),
        ({"prompt": [31_999] * 131_071}, MODEL_OF_LONG_TEXTS),
        ({"prompt": [[127_999] * 131_071] * 4}, MODEL_OF_LONG_TEXTS),
        ({"prompt": [[1] * 2048] * 128}, LIMITS),
        ({"prompt": [31_999] * 60_000, "truncate_prompt_tokens": 100}, LIMITS),
        ({"prompt": "a", "logit_bias": {str(number): -100 for number in range(1_024)}}, LIMITS),
        ({"messages": [{"role": "user", "content": "a, b"}] * 10_000}, LIMITS),
        (
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "{,}" * 900}]}] * 1_000,
                "tools": [{"type": "function", "function": {"name": "f", "parameters": schema(50)}}] * 128,
            },
            LIMITS,
        ),
        ({"messages": [], "documents": [{"title": "a", "text": "b, " * 100}] * 10_000}, LIMITS),
        ({"inputs": ["a, b" * 8_000] * 128, "parameters": {"stop": ["a"] * 16}}, LIMITS),
        ({"inputs": "a", "parameters": {"grammar": {"type": "json", "value": schema(200)}}}, LIMITS),
        ({"tokens": list(range(500_000))}, LIMITS),
    ],
)
def test_large_bodies_that_ask_for_something_are_read(body: dict[str, Any], limits: BodyLimits) -> None:
    check_structure(json.dumps(body).encode(), limits)


async def test_owners_of_heavy_bodies_take_turns() -> None:
    turns, served = Turns(), list[str]()
    await turns.take("first", 1)

    async def wait(owner: str) -> None:
        await turns.take(owner, 1)
        served.append(owner)

    waiting = [asyncio.create_task(wait(owner)) for owner in ["busy"] * 5 + ["other"] * 2]
    gone = [asyncio.create_task(wait("gone")) for _ in range(2)]
    await asyncio.sleep(0)
    gone[0].cancel()
    for _ in range(7):
        turns.give()
        await asyncio.sleep(0)
    assert served == ["busy", "other", "gone", "busy", "other", "busy", "busy"]
    turns.give()
    waiting[-3].cancel()  # it has just got its turn
    await asyncio.gather(*waiting, *gone, return_exceptions=True)
    async with asyncio.timeout(5):
        await turns.take("next", 1)


async def test_of_too_much_that_waits_the_newest_of_the_busiest_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = json.dumps({"messages": [[]] * 2_000}).encode()
    monkeypatch.setattr(json_bodies, "MAX_WAITING_BYTES", 3 * len(body))
    reader = BodyReader(1 << 20, LIMITS)
    calls = [reader.check(body, owner) for owner in (*["busy"] * 5, "other")]
    results = await asyncio.gather(*calls, return_exceptions=True)
    refused = [isinstance(each, OverloadedError) for each in results]
    assert refused == [False, False, False, True, True, False]


async def test_a_body_that_is_dropped_at_its_cancellation_fails_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cancelled request has not run yet, and its body still waits, when another body drops it."""
    monkeypatch.setattr(json_bodies, "MAX_WAITING_BYTES", 10)
    turns = Turns()
    await turns.take("busy", 1)
    cancelled = asyncio.create_task(turns.take("cancelled", 9))
    await asyncio.sleep(0)
    cancelled.cancel()
    asyncio.get_running_loop().call_soon(turns.give)
    async with asyncio.timeout(5):
        await turns.take("next", 5)


async def test_the_bodies_of_requests_that_leave_are_checked_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A check takes several times the memory of its body, and cannot be interrupted."""
    running, most = set[object](), list[int]()
    may_end = threading.Event()

    def check(body: bytes, limits: BodyLimits) -> Weight:
        running.add(body)
        most.append(len(running))
        may_end.wait()
        running.remove(body)
        return LIGHT

    monkeypatch.setattr(json_bodies, "check_structure", check)
    reader = BodyReader(1 << 20, LIMITS)
    try:
        for number in range(3):
            task = asyncio.create_task(reader.check(b"%d" % number * (LONG_BYTES + 1), "a"))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.wait((task,))
            assert task.cancelled()
    finally:
        may_end.set()
    await reader.check(b"4" * (LONG_BYTES + 1), "a")
    assert most == [1, 1]


async def test_a_light_body_waits_for_no_turn() -> None:
    reader = BodyReader(1 << 20, LIMITS)
    heavy = json.dumps({"messages": [[]] * 20_000}).encode()
    waiting = [asyncio.create_task(reader.check(heavy, "a")) for _ in range(20)]
    await asyncio.sleep(0.01)
    async with asyncio.timeout(0.1):
        await reader.check(b'{"prompt": "a"}', "a")
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


MANY = [[]] * (json_structure.MAX_LISTS + 1)


CASES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "openai": [
        ("/v1/completions", {"prompt": MANY}),
        ("/v1/chat/completions", {"messages": [HELLO], "chat_template_kwargs": {"x": MANY}}),
        ("/v1/chat/completions", {"messages": [HELLO, calling(json.dumps({"x": MANY}))]}),
        ("/v1/chat/completions", {"messages": [HELLO, *[calling(json.dumps({"x": MANY[:3000]}))] * 11]}),
        ("/tokenize", {"messages": [HELLO, calling(json.dumps(MANY))]}),
    ],
    "tgi": [
        ("/generate", {"inputs": "a", "parameters": {"grammar": {"type": "json", "value": MANY}}}),
        ("/chat_tokenize", {"messages": [HELLO], "chat_template_kwargs": {"x": MANY}}),
    ],
    "lmi": [("/invocations", {"inputs": "a", "parameters": {"x": MANY}})],
}


@pytest.mark.parametrize("api", CASES)
async def test_every_api_refuses_many_lists(tmp_path: Path, api: str) -> None:
    async with open_chats(tmp_path, http_api=api) as (served, _):
        for path, body in CASES[api]:
            reply = await asyncio.to_thread(exchange, served.url + path, body)
            assert reply.status == (424 if api == "lmi" else 400), (path, reply.text)
            assert "more than 32768 lists and objects" in reply.text, (path, reply.text)


async def test_a_heavy_chat_is_rendered_whole(tmp_path: Path) -> None:
    """Other requests are served meanwhile."""
    messages = [{"role": "user", "content": f'"{number}"\n'} for number in range(2_000)]
    async with open_chats(tmp_path) as (served, _):
        body = {"messages": messages, "chat_template_kwargs": {"big": 2**70, "é": [None, 1.5, True]}}
        reply = await asyncio.to_thread(exchange, f"{served.url}/tokenize", body)
        assert reply.status == 200, reply.text
        text = await asyncio.to_thread(exchange, f"{served.url}/detokenize", {"tokens": reply.json["tokens"]})
        assert text.json["prompt"].count('"\n') == 2_000
        assert '"1999"' in text.json["prompt"]
