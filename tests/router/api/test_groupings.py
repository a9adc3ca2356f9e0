"""Tests that every API returns the same answer however tokens are grouped when they arrive."""

import json
import random
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import accumulate
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.router.groupings import (
    Split,
    all_at_once,
    at_random,
    ending_with,
    group_events,
    one_by_one,
)
from tests.support.router.messages import batch, single, stopping
from tests.support.router.scripted_chats import WEATHER, scripted_chats
from tests.support.router.served_chats import HELLO
from tests.support.router.served_grpc import open_grpc
from tests.support.router.served_http import ServedHttp
from tests.support.router.served_inputs import call, open_inputs
from tests.support.streams import join_choices, join_parts, join_stream, read_chunks
from tgis.pb import generation_pb2 as pb
from tgis.router.api.service import MAX_TOKENS_PER_OUTPUT
from tgis.router.chat.formats.hermes import HERMES
from tgis.router.chat.formats.registry import ChatFormats
from tgis.router.chat.formats.think import THINK
from tgis.router.errors import Code
from tgis.router.events import Failed, Failure, TimedOut

TEXTS = ("a", "Once upon a time", "naïve café 東京 🙂")
LENGTH, NUM_LONG = 40, 190
STOPS: tuple[list[str], ...] = ([], ["e"], [" a", "the ", "xyz"])


def splits(seed: int) -> list[Split]:
    return [all_at_once, *(at_random(random.Random(10 * seed + number)) for number in range(4))]


@pytest.mark.parametrize("with_details", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_fmaas(with_details: bool, tmp_path: Path) -> None:
    sizes = set[int]()
    async with open_grpc(tmp_path) as served:
        for seed, text in enumerate(TEXTS):
            for stops in STOPS:
                limits = stopping(LENGTH, stop_sequences=stops, include_stop_sequence=seed % 2 == 0)
                response = pb.ResponseOptions()
                if with_details:
                    response = pb.ResponseOptions(
                        generated_tokens=True,
                        input_tokens=True,
                        token_logprobs=True,
                        token_ranks=True,
                        top_n_tokens=2,
                    )
                request = single(text, stopping=limits, response=response)
                group_events(served.handle, one_by_one)
                header, *alone = [part async for part in served.stub.GenerateStream(request)]
                for split in splits(seed):
                    group_events(served.handle, split)
                    first, *parts = [part async for part in served.stub.GenerateStream(request)]
                    assert first == header
                    assert join_stream(parts) == join_stream(alone)
                    check_counts(parts, with_details)
                    sizes |= {len(part.tokens) for part in parts}
    assert not with_details or sizes >= {1, 2, 3}


@pytest.mark.parametrize(("num_top", "max_tokens"), [(5, MAX_TOKENS_PER_OUTPUT // 6), (0, NUM_LONG)])
async def test_no_message_is_long(num_top: int, max_tokens: int, tmp_path: Path) -> None:
    """Messages are short however late a client reads. A unary answer is complete."""
    async with open_grpc(tmp_path) as served:
        group_events(served.handle, all_at_once)
        details = pb.ResponseOptions(generated_tokens=True, token_logprobs=True, top_n_tokens=num_top)
        params = {"stopping": stopping(NUM_LONG, min_new_tokens=NUM_LONG), "response": details}
        parts = [part async for part in served.stub.GenerateStream(single("girl", **params))]
        [whole] = (await served.stub.Generate(batch("girl", **params))).responses
    sizes = [len(part.tokens) for part in parts[1:]]
    assert sizes == [
        *[max_tokens] * (NUM_LONG // max_tokens),
        *([NUM_LONG % max_tokens] if NUM_LONG % max_tokens else []),
    ]
    assert [part.generated_token_count for part in parts[1:]] == list(accumulate(sizes))
    joined = join_stream(parts)
    assert (joined.text, joined.tokens) == (whole.text, whole.tokens)


def check_counts(parts: Sequence[pb.GenerationResponse], with_details: bool) -> None:
    """Check that each message counts the tokens up to its own last one, and that no message is empty."""
    num_tokens = 0
    for part in parts:
        num_tokens += len(part.tokens)
        if with_details and not part.input_tokens:
            assert part.generated_token_count == num_tokens
    *others, _ = parts
    assert all(part.tokens or part.input_tokens or part.text for part in others)
    counts = [part.generated_token_count for part in parts if part.generated_token_count]
    assert counts == sorted(set(counts))


def check_usage(chunks: list[Any]) -> None:
    """Check that each chunk counts the tokens up to its own last one."""
    numbers = dict[int, int]()
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            index = choice["index"]
            numbers[index] = numbers.get(index, 0) + len(choice.get("token_ids") or ())
            assert chunk["usage"]["completion_tokens"] == numbers[index]


async def stream(served: ServedHttp, path: str, body: Any) -> bytes:
    reply = await call(served, path, body)
    assert reply.status == 200, reply.text
    return reply.body


COUNTS = {"include_usage": True, "continuous_usage_stats": True}
OPENAI = {"model": "alias", "max_tokens": LENGTH, "stream": True, "temperature": 0}
DETAILS = {"return_token_ids": True, "stream_options": COUNTS}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream_options": COUNTS},
        DETAILS | {"logprobs": 2, "echo": True},
        DETAILS | {"logprobs": 0, "n": 3, "temperature": 1, "seed": 5},
        {"n": 2, "temperature": 1, "seed": 5},
        {"stop": ["e", " a"]},
        DETAILS | {"logprobs": 1, "stop": ["e"], "include_stop_str_in_output": True},
    ],
)
async def test_completions(fields: dict[str, Any], tmp_path: Path) -> None:
    async with open_inputs(tmp_path, "openai") as served:
        for seed, text in enumerate(TEXTS):
            body = OPENAI | {"stream_options": {"include_usage": True}} | fields | {"prompt": text}
            await check_chunks(served, "/v1/completions", body, seed)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        DETAILS | {"logprobs": True, "top_logprobs": 2},
        DETAILS | {"logprobs": True, "n": 3, "temperature": 1, "seed": 5},
        {"stop": ["e", " a"], "n": 2},
    ],
)
async def test_chats(fields: dict[str, Any], tmp_path: Path) -> None:
    async with open_inputs(tmp_path, "openai") as served:
        body = OPENAI | {"stream_options": {"include_usage": True}} | fields | {"messages": HELLO}
        await check_chunks(served, "/v1/chat/completions", body, 1)


async def check_chunks(served: ServedHttp, path: str, body: dict[str, Any], seed: int) -> None:
    group_events(served.handle, one_by_one)
    await stream(served, path, body)  # later calls find its input in the prefix cache
    alone = read_chunks(await stream(served, path, body))
    num_most = len(alone)
    for split in splits(seed):
        group_events(served.handle, split)
        chunks = read_chunks(await stream(served, path, body))
        assert len(chunks) <= num_most
        if body.get("return_token_ids"):
            check_usage(chunks)
        assert join_choices(chunks) == join_choices(deepcopy(alone))


ANSWERS = (
    "<think>\nto be</think>\n\nnot to be",
    "<think></think>",
    "<think>to be",
    "hm",
    'so <tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>',
    "<think>a</think>" + 2 * '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>',
)


@pytest.mark.parametrize("marks", [("<think>", "</think>"), pytest.param((), marks=pytest.mark.slow)])
async def test_reasoning_and_calls(marks: tuple[str, ...], tmp_path: Path) -> None:
    """The number of reasoning tokens is the same too. The marks may be several tokens."""
    async with scripted_chats(tmp_path, ChatFormats(HERMES, THINK), marks=marks) as chats:
        for seed, text in enumerate(ANSWERS):
            chats.script(text)
            body = OPENAI | {"messages": HELLO, "tools": [WEATHER], "max_tokens": 400}
            body |= {"stream_options": {"include_usage": True}, "logprobs": seed % 2 == 0}
            await check_chunks(chats.served, "/v1/chat/completions", body, seed)
            body |= {"stream": False, "stream_options": None}
            whole = [await whole_answer(chats.served, body, split) for split in (all_at_once, one_by_one)]
            assert whole[0] == whole[1]


async def whole_answer(served: ServedHttp, body: dict[str, Any], split: Split) -> tuple[Any, Any]:
    group_events(served.handle, split)
    answer = json.loads(await stream(served, "/v1/chat/completions", body))
    for one in answer["choices"][0]["message"].get("tool_calls", ()):
        one.pop("id")
    return answer["choices"], answer["usage"]


PARAMETERS: tuple[dict[str, Any], ...] = (
    {},
    {"details": True, "decoder_input_details": False},
    {"do_sample": True, "seed": 7, "details": True},
    {"stop": ["e", " a"], "details": True},
)


@pytest.mark.parametrize("parameters", PARAMETERS)
async def test_tgi(parameters: dict[str, Any], tmp_path: Path) -> None:
    """An event has one token however tokens are grouped, so the bytes are the same."""
    async with open_inputs(tmp_path, "tgi") as served:
        for seed, text in enumerate(TEXTS):
            body = {"inputs": text, "parameters": {"max_new_tokens": LENGTH, "top_n_tokens": 2} | parameters}
            await check_bytes(served, "/generate_stream", body, seed)


@pytest.mark.parametrize("formatter", ["jsonlines", "tgi"])
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"details": True},
        {"do_sample": True, "seed": 7},
        {"stop_sequences": ["e", " a"], "details": True},
        {"stop_sequences": ["e"], "include_stop_str_in_output": True},
    ],
)
async def test_lmi(formatter: str, parameters: dict[str, Any], tmp_path: Path) -> None:
    async with open_inputs(tmp_path, "lmi", lmi_output_formatter=formatter) as served:
        for seed, text in enumerate(TEXTS):
            body = {"inputs": text, "parameters": {"max_new_tokens": LENGTH} | parameters, "stream": True}
            await check_bytes(served, "/invocations", body, seed)


async def check_bytes(served: ServedHttp, path: str, body: dict[str, Any], seed: int) -> None:
    group_events(served.handle, one_by_one)
    alone = await stream(served, path, body)
    for split in splits(seed):
        group_events(served.handle, split)
        assert await stream(served, path, body) == alone


FAILURES: tuple[tuple[Failure, str], ...] = (
    (Failed(Code.UNAVAILABLE, "lost"), "generate"),
    (TimedOut(1.5, False), "token_timeout"),
)
NUM_BEFORE = 5
SPLITS = (one_by_one, all_at_once)


@pytest.mark.parametrize(("failure", "label"), FAILURES)
async def test_a_failure_of_fmaas(failure: Failure, label: str, tmp_path: Path) -> None:
    """Tokens that arrive with a failure are returned before it, and the failure is counted once."""
    details = pb.ResponseOptions(generated_tokens=True)
    request = single(TEXTS[1], stopping=stopping(LENGTH, min_new_tokens=LENGTH), response=details)
    async with open_grpc(tmp_path) as served:
        outcomes = []
        for split in SPLITS:
            group_events(served.handle, ending_with(failure, NUM_BEFORE, split))
            text, num_tokens, call = "", 0, served.stub.GenerateStream(request)
            with suppress(grpc.aio.AioRpcError):
                async for part in call:
                    text += part.text
                    num_tokens += len(part.tokens)
            outcomes.append((text, num_tokens, await call.code(), await call.details()))
        assert outcomes[0] == outcomes[1]
        assert outcomes[0][1] == NUM_BEFORE
        assert served.scene.metrics.request_failure.values() == {(label,): len(SPLITS)}


STREAMS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("openai", "/v1/completions", OPENAI | {"prompt": TEXTS[1], "min_tokens": LENGTH}),
    ("openai", "/v1/chat/completions", OPENAI | {"messages": HELLO, "min_tokens": LENGTH}),
    ("tgi", "/generate_stream", {"inputs": TEXTS[1]}),
    ("lmi", "/invocations", {"inputs": TEXTS[1], "stream": True, "parameters": {"details": True}}),
)


@pytest.mark.parametrize(("failure", "label"), FAILURES)
@pytest.mark.parametrize(("api", "path", "body"), STREAMS, ids=[path for _, path, _ in STREAMS])
async def test_a_failure_over_http(
    api: str, path: str, body: dict[str, Any], failure: Failure, label: str, tmp_path: Path
) -> None:
    async with open_inputs(tmp_path, api) as served:
        outcomes = []
        for split in SPLITS:
            group_events(served.handle, ending_with(failure, NUM_BEFORE, split))
            outcomes.append(await stream(served, path, body))
        if api == "openai":
            assert failed_chunks(outcomes[0]) == failed_chunks(outcomes[1])
        else:
            assert outcomes[0] == outcomes[1]
            assert outcomes[0].count(b'"token":') == NUM_BEFORE + (api == "lmi")
        assert served.scene.metrics.request_failure.values() == {(label,): len(SPLITS)}


def failed_chunks(body: bytes) -> tuple[dict[int, Any], Any]:
    *chunks, last = read_chunks(body)
    choices: dict[int, Any] = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        choices[choice["index"]] = join_parts(choices.get(choice["index"]), choice)
    assert choices
    return choices, last["error"]
