"""Tests completions over a real socket, with OpenAI's own client and as plain HTTP."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.support.router.fake_shard import EOS, VOCAB_SIZE
from tests.support.router.model_of_shard import next_token
from tests.support.router.served_http import MODEL, ServedHttp, open_http
from tests.support.tokenizers.trained import write_byte_level
from tgis.router.api.openai.answers.logprobs_encoder import LogprobsEncoder
from tgis.router.api.openai.completions.choices import CompletionJob, write_choices
from tgis.router.api.openai.completions.chunks import ChunkWriter
from tgis.router.api.openai.completions.types import Completion, CompletionRequest
from tgis.router.api.openai.rules import OPENAI
from tgis.router.api.service import Result
from tgis.router.engine.handle import SequenceSpec
from tgis.router.events import Output
from tgis.router.requests.call import GenerationCall
from tgis.router.requests.parameters import Parameters
from tgis.router.sequence import Stopping, StopReason, TokenDetail
from tgis.router.text.detokenizer import Vocabulary
from tgis.router.text.tokenizer import Tokenizer

PROMPT = "The quick brown fox"
LONG = PROMPT + " jumps over the lazy dog. 1 2 1 2 1 2 1 2"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture
async def served(tmp_path: Any) -> AsyncIterator[ServedHttp]:
    async with open_http(tmp_path) as served:
        yield served


@pytest.fixture
async def client(served: ServedHttp) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(api_key="none", base_url=f"{served.url}/v1", max_retries=0) as client:
        yield client


def ids_of(served: ServedHttp, text: str) -> list[int]:
    ids: list[int] = served.tokenizer.fast.encode(text).ids
    return ids


def follow(inputs: list[int], max_new_tokens: int) -> list[int]:
    """Return the tokens that the model of a shard generates."""
    tokens = list(inputs)
    while len(tokens) < len(inputs) + max_new_tokens and (len(tokens) == len(inputs) or tokens[-1] != EOS):
        tokens.append(next_token(tokens, VOCAB_SIZE))
    return tokens[len(inputs) :]


def text_of(served: ServedHttp, token_ids: list[int]) -> str:
    text: str = served.tokenizer.fast.decode(token_ids)
    return text.rstrip(REPLACEMENT)


async def create(client: openai.AsyncOpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    return await client.completions.create(model=MODEL, prompt=prompt, temperature=0, **fields)


async def joined(client: openai.AsyncOpenAI, prompt: Any = PROMPT, **fields: Any) -> dict[int, Any]:
    """Return a streamed answer's choices by index: text, reason, and the joined lists of logprobs."""
    choices: dict[int, Any] = {}
    async for chunk in await create(client, prompt, stream=True, **fields):
        for part in chunk.choices:
            choice = choices.setdefault(part.index, {"text": "", "reason": None, "logprobs": {}, "parts": []})
            assert choice["reason"] is None, "nothing follows the last chunk"
            choice["text"] += part.text
            choice["reason"] = part.finish_reason
            choice["parts"].append(part)
            for name, values in (part.logprobs.model_dump() if part.logprobs else {}).items():
                choice["logprobs"].setdefault(name, []).extend(values)
    return choices


async def test_text(served: ServedHttp, client: openai.AsyncOpenAI) -> None:
    inputs = ids_of(served, PROMPT)
    tokens = follow(inputs, 12)
    answer = await create(client, max_tokens=12)
    (choice,) = answer.choices
    assert choice.text == text_of(served, tokens)
    assert choice.finish_reason == ("stop" if tokens[-1] == EOS else "length")
    assert choice.logprobs is None
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.id.startswith("cmpl-")
    assert answer.system_fingerprint
    usage = answer.usage
    counts = (len(inputs), len(tokens), len(inputs) + len(tokens))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == counts
    assert usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens(served: ServedHttp, client: openai.AsyncOpenAI, stream: bool) -> None:
    for cached in (0, (len(ids_of(served, LONG)) - 1) // 8 * 8):  # whole blocks of the fake shard
        if stream:
            options = {"include_usage": True}
            answer = await create(client, LONG, max_tokens=2, stream=True, stream_options=options)
            *_, last = [chunk async for chunk in answer]
        else:
            last = await create(client, LONG, max_tokens=2)
        assert last.usage.prompt_tokens_details.cached_tokens == cached
    assert cached > 0


async def test_rest_of_the_context(served: ServedHttp, client: openai.AsyncOpenAI) -> None:
    inputs = ids_of(served, PROMPT)
    expected = follow(inputs, 200 - len(inputs))
    for fields in ({}, {"max_tokens": 5000}):
        answer = await create(client, extra_body={"ignore_eos": False}, **fields)
        assert answer.choices[0].text == text_of(served, expected)
        assert answer.usage.completion_tokens == len(expected)


@pytest.mark.parametrize("as_ids", [False, True])
async def test_batches(served: ServedHttp, client: openai.AsyncOpenAI, as_ids: bool) -> None:
    texts = [PROMPT, "Once upon a time", "naïve café"]
    inputs = [ids_of(served, text) for text in texts]
    prompt = inputs if as_ids else texts
    answer = await create(client, prompt, max_tokens=9, n=2)
    expected = [text_of(served, follow(ids, 9)) for ids in inputs for _ in range(2)]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage.prompt_tokens == sum(map(len, inputs))
    assert answer.usage.completion_tokens == 2 * sum(len(follow(ids, 9)) for ids in inputs)
    streamed = await joined(client, prompt, max_tokens=9, n=2)
    assert [streamed[index]["text"] for index in range(6)] == expected
    single = await create(client, inputs[0], max_tokens=9)
    assert single.choices[0].text == expected[0]


@pytest.mark.parametrize("is_included", [False, True])
async def test_stops(served: ServedHttp, client: openai.AsyncOpenAI, is_included: bool) -> None:
    text = text_of(served, follow(ids_of(served, PROMPT), 40))
    assert len(text) > 20
    stop = next(text[at : at + 2] for at in range(8, len(text)) if REPLACEMENT not in text[at : at + 2])
    before = text[: text.index(stop) + (len(stop) if is_included else 0)]
    fields: dict[str, Any] = {
        "max_tokens": 40,
        "stop": [stop],
        "extra_body": {"include_stop_str_in_output": is_included},
    }
    (choice,) = (await create(client, **fields)).choices
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (before, "stop", stop)
    streamed = (await joined(client, **fields))[0]
    assert (streamed["text"], streamed["reason"]) == (before, "stop")
    assert streamed["parts"][-1].stop_reason == stop


async def test_stop_token(served: ServedHttp, client: openai.AsyncOpenAI) -> None:
    tokens = follow(ids_of(served, PROMPT), 10)
    at = tokens.index(tokens[5])
    (choice,) = (await create(client, max_tokens=10, extra_body={"stop_token_ids": [tokens[5]]})).choices
    assert (choice.finish_reason, choice.stop_reason) == ("stop", tokens[5])
    assert choice.text == text_of(served, tokens[:at])


async def test_end_of_sequence(served: ServedHttp, client: openai.AsyncOpenAI) -> None:
    prompt = next(ids for ids in ([5, each] for each in range(3, 400)) if follow(ids, 30)[-1] == EOS)
    tokens = follow(prompt, 30)
    (choice,) = (await create(client, prompt, max_tokens=60, logprobs=0)).choices
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert choice.text == text_of(served, tokens[:-1])
    assert len(choice.logprobs.tokens) == len(tokens)  # evaluations rely on the last one too
    assert choice.logprobs.tokens[-1] == "</s>"


@pytest.mark.parametrize("echo", [False, True])
async def test_streams_equal_whole_answers(
    served: ServedHttp, client: openai.AsyncOpenAI, echo: bool
) -> None:
    fields: dict[str, Any] = {"max_tokens": 15, "n": 2, "echo": echo, "logprobs": 2}
    whole = await create(client, [PROMPT, "東京 🙂"], **fields)
    streamed = await joined(client, [PROMPT, "東京 🙂"], **fields)
    for choice in whole.choices:
        part = streamed[choice.index]
        assert (part["text"], part["reason"]) == (choice.text, choice.finish_reason)
        assert part["logprobs"] == choice.logprobs.model_dump()


async def test_echo(served: ServedHttp, client: openai.AsyncOpenAI) -> None:
    inputs = ids_of(served, PROMPT)
    generated = follow(inputs, 5)
    (choice,) = (await create(client, max_tokens=5, echo=True)).choices
    assert choice.text == PROMPT + text_of(served, generated)
    (choice,) = (await create(client, inputs, max_tokens=5, echo=True, logprobs=1)).choices
    assert choice.text == PROMPT + text_of(served, generated)
    assert len(choice.logprobs.tokens) == len(inputs) + len(generated)
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.text_offset[0] == 0
    assert choice.logprobs.text_offset[len(inputs)] == len(PROMPT)


@pytest.mark.parametrize("stream", [False, True])
async def test_scores_only(served: ServedHttp, client: openai.AsyncOpenAI, stream: bool) -> None:
    fields: dict[str, Any] = {"max_tokens": 0, "echo": True, "logprobs": 0}
    if stream:
        choice = (await joined(client, **fields))[0]
        text, reason, tokens = choice["text"], choice["reason"], choice["logprobs"]["tokens"]
    else:
        answer = await create(client, **fields)
        assert answer.usage.completion_tokens == 0
        (whole,) = answer.choices
        text, reason, tokens = whole.text, whole.finish_reason, whole.logprobs.tokens
    assert (text, reason) == (PROMPT, "length")
    assert len(tokens) == len(ids_of(served, PROMPT))


async def test_usage_of_streams(served: ServedHttp, client: openai.AsyncOpenAI) -> None:
    whole = await create(client, max_tokens=7, n=2)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = [
        chunk async for chunk in await create(client, max_tokens=7, n=2, stream=True, stream_options=options)
    ]
    last = chunks[-1]
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    counts = [chunk.usage.completion_tokens for chunk in chunks[:-1] if chunk.choices[0].index == 0]
    assert counts == sorted(counts)
    assert len({chunk.id for chunk in chunks}) == 1
    plain = [chunk async for chunk in await create(client, max_tokens=7, stream=True)]
    assert all(chunk.usage is None and chunk.choices for chunk in plain)


async def test_seeds(served: ServedHttp, client: openai.AsyncOpenAI) -> None:
    served.scene.shard.model.uses_seeds = True

    async def texts(**fields: Any) -> list[str]:
        answer = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=9, **fields)
        return [choice.text for choice in answer.choices]

    first = await texts(seed=5, n=3)
    assert len(set(first)) == 3
    assert await texts(seed=5, n=3) == first
    assert await texts(seed=-1) == await texts(seed=2**64 - 1)
    assert await texts() != await texts()


async def test_best_of(served: ServedHttp, client: openai.AsyncOpenAI) -> None:
    answer = await create(client, max_tokens=6, best_of=4, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == 4 * len(follow(ids_of(served, PROMPT), 6))


async def test_the_best_are_the_likeliest_per_token(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    tokenizer = Tokenizer(tmp_path, 1)
    body = CompletionRequest(prompt="a", n=2, best_of=4, max_tokens=9)
    call = GenerationCall("Completion", "single", ["a"], Parameters(n=4), str, (), "", api=OPENAI)
    header = Completion(id="cmpl-1", created=1, model=MODEL, choices=[])
    results = []
    for number, logprobs in enumerate([(-1.0,), (-0.5, -0.5, -0.5), (-9.0,), (-0.75, -0.75)]):
        tokens = [TokenDetail(5, logprob) for logprob in logprobs]
        last = Output(("",), (tokens[-1],), len(tokens), StopReason.MAX_TOKENS)
        results.append(Result(SequenceSpec((1, 2), Stopping(9)), [str(number)], tokens, (), last))
    job = CompletionJob(body, call, header, Vocabulary(tokenizer), LogprobsEncoder(asyncio.Lock()))
    choices, usage = await write_choices(job, results)
    assert [(choice.index, choice.text) for choice in choices] == [(0, "1"), (1, "3")]
    assert (usage.prompt_tokens, usage.completion_tokens) == (2, 7)
    tokenizer.close()


async def test_choices_wait_for_their_prompt(tmp_path: Path) -> None:
    """Only a prompt's first choice carries the prompt's log-probabilities. Other choices may be faster."""
    write_byte_level(tmp_path)
    tokenizer = Tokenizer(tmp_path, 1)
    body = CompletionRequest(prompt="ab", n=2, logprobs=0, echo=True)
    params = Parameters(n=2, generated_tokens=True, input_tokens=True, token_logprobs=True)
    call = GenerationCall("Completion", "stream", ["ab"], params, str, (), "", api=OPENAI)
    header = Completion(id="cmpl-1", created=1, model=MODEL, choices=[])
    specs = [SequenceSpec((5, 6), Stopping(9))] * 2
    writer = ChunkWriter(
        CompletionJob(body, call, header, Vocabulary(tokenizer), LogprobsEncoder(asyncio.Lock())), specs
    )
    assert not [chunk async for chunk in writer.begin()]
    assert not list(writer.write(1, Output(("early",), (TokenDetail(7, -1.0),), 1)))
    chunks = [chunk async for chunk in writer.write_prompt(0, (TokenDetail(5), TokenDetail(6, -2.0)))]
    choices = [json.loads(chunk.removeprefix(b"data: "))["choices"][0] for chunk in chunks]
    assert [(each["index"], each["text"]) for each in choices] == [(0, "ab"), (1, "ab"), (1, "early")]
    assert [each["logprobs"]["token_logprobs"] for each in choices] == [[None, -2.0], [None, -2.0], [-1.0]]
    tokenizer.close()


async def test_token_ids(served: ServedHttp, client: openai.AsyncOpenAI) -> None:
    inputs = ids_of(served, PROMPT)
    tokens = follow(inputs, 6)
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    (choice,) = (await create(client, max_tokens=6, logprobs=0, extra_body=extra)).choices
    assert (choice.prompt_token_ids, choice.token_ids) == (inputs, tokens)
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in tokens]
    parts = (await joined(client, max_tokens=6, extra_body=extra))[0]["parts"]
    assert parts[0].prompt_token_ids == inputs
    assert [token for part in parts for token in part.token_ids or []] == tokens


async def test_prompt_logprobs(served: ServedHttp, client: openai.AsyncOpenAI) -> None:
    inputs = ids_of(served, PROMPT)
    (choice,) = (await create(client, max_tokens=2, extra_body={"prompt_logprobs": 1})).choices
    first, *others = choice.prompt_logprobs
    assert first is None
    assert len(others) == len(inputs) - 1
    for rank, (token_id, one) in enumerate(zip(inputs[1:], others, strict=True), 1):
        assert one[str(token_id)]["rank"] == rank  # the fake shard's ranks are positions
        assert math.isfinite(one[str(token_id)]["logprob"])
        assert one[str(token_id)]["decoded_token"]
    parts = (await joined(client, max_tokens=2, extra_body={"prompt_logprobs": 1}))[0]["parts"]
    assert parts[0].prompt_logprobs == choice.prompt_logprobs


async def test_special_tokens(served: ServedHttp, client: openai.AsyncOpenAI) -> None:
    plain = ids_of(served, PROMPT)[1:]
    answer = await create(client, max_tokens=3, extra_body={"add_special_tokens": False})
    assert answer.usage.prompt_tokens == len(plain)
    assert answer.choices[0].text == text_of(served, follow(plain, 3))
    answer = await create(client, max_tokens=3, extra_body={"truncate_prompt_tokens": 4}, echo=True)
    assert answer.usage.prompt_tokens == 4


WRONG = [
    ("prompt", None),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", ["a", 1]),
    ("prompt", ["a"] * 129),
    ("prompt", [-1]),
    ("prompt", [399, 400]),
    ("prompt", {"secret": 1}),
    ("prompt", "a b c d" * 200),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "secret"),
    ("max_tokens", 1.5),
    ("temperature", 2.1),
    ("temperature", -0.1),
    ("temperature", "secret"),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", 1.1),
    ("seed", 1.5),
    ("stop", [""]),
    ("stop", ["secret" * 100]),
    ("stop", ["a"] * 17),
    ("stop", [1]),
    ("stop_token_ids", [400]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", list(range(65))),
    ("min_tokens", -1),
    ("min_tokens", 250),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("logit_bias", {"secret": 1}),
    ("logit_bias", {"400": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": 1, "01": 1}),
    ("logit_bias", [1]),
    ("n", 0),
    ("n", 129),
    ("best_of", 0),
    ("logprobs", 21),
    ("logprobs", True),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
    ("cache_salt", "s" * 257),
    ("cache_salt", 5),
    ("echo", "secret"),
    ("stream", "secret"),
    ("stream_options", {"include_usage": True}),
    ("suffix", "secret"),
    ("truncate_prompt_tokens", 0),
    ("ignore_eos", 1),
    ("use_beam_search", True),
    ("allowed_token_ids", [1]),
    ("priority", 2**31),
    ("priority", 1.5),
    ("skip_special_tokens", False),
]


async def test_wrong_values(served: ServedHttp) -> None:
    async with httpx2.AsyncClient(base_url=served.url) as http:
        for field, value in WRONG:
            body = {"prompt": "secret", "max_tokens": 2} | {field: value}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 400, (field, value)
            error = answer.json()["error"]
            assert error["param"].partition("[")[0] == field, (value, error)
            assert error["type"] == "invalid_request_error"
            assert "secret" not in error["message"]
    assert not served.handle.specs


async def test_zero_and_negative_numbers_have_one_text(served: ServedHttp) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    prompt: dict[str, Any] = {"prompt": "a"}
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        ("completions", prompt, "max_tokens", ">= 1, or 0 with echo or prompt_logprobs"),
        ("completions", prompt, "n", ">= 1"),
        ("completions", prompt, "best_of", ">= 1"),
        ("completions", prompt, "truncate_prompt_tokens", ">= 1"),
        ("chat/completions", chat, "max_tokens", ">= 1"),
        ("chat/completions", chat, "max_completion_tokens", ">= 1"),
    ]
    async with httpx2.AsyncClient(base_url=served.url) as http:
        for path, body, field, rule in cases:
            for value in (0, -5):
                answer = await http.post(f"/v1/{path}", json=body | {field: value})
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, field)
                assert error["message"] == f"{field} must be {rule}", (path, value)
        answer = await http.post("/v1/completions", json=prompt | {"echo": True, "max_tokens": -5})
        assert answer.json()["error"]["message"] == "max_tokens must be >= 0"


async def test_failures_of_streams(served: ServedHttp) -> None:
    """A stream that fails after its beginning ends with an error and the usual last event."""
    served.scene.shard.model.refuses = lambda row: True
    async with httpx2.AsyncClient(base_url=served.url) as http:
        body = {"prompt": PROMPT, "max_tokens": 5, "stream": True, "echo": True, "n": 2}
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    first, second, error, done, end = answer.text.split("\n\n")
    assert PROMPT in first
    assert PROMPT in second
    assert set(json.loads(error.removeprefix("data: "))["error"]) == {"message", "type", "param", "code"}
    assert (done, end) == ("data: [DONE]", "")


async def test_refusals(served: ServedHttp) -> None:
    async with httpx2.AsyncClient(base_url=served.url) as http:
        for body in (b"", b"[", b"[]", b'{"prompt": "\xff"}', b'{"x":' + b"[" * 100_000):
            answer = await http.post("/v1/completions", content=body)
            assert answer.status_code == 400
        fields = {"prompt": "a", "n": 2, "best_of": 1}
        error = (await http.post("/v1/completions", json=fields)).json()["error"]
        assert error["param"] == "best_of"
        fields = {"prompt": "a", "n": 1, "best_of": 2, "stream": True}
        error = (await http.post("/v1/completions", json=fields)).json()["error"]
        assert error["param"] == "best_of"
        fields = {"prompt": [5] * 200, "stream": True}
        answer = await http.post("/v1/completions", json=fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert not served.handle.specs


async def test_events(served: ServedHttp) -> None:
    """Each event is one line of JSON. The last event marks the end."""
    async with httpx2.AsyncClient(base_url=served.url) as http:
        body = {"prompt": PROMPT, "max_tokens": 5, "stream": True, "temperature": 0, "model": "alias"}
        answer = await http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {(chunk["id"], chunk["model"]) for chunk in chunks} == {("cmpl-mine", "alias")}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of(
        served, follow(ids_of(served, PROMPT), 5)
    )
