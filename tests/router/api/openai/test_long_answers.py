"""Tests that answers with many details of many tokens are complete, and that other tasks run meanwhile."""

import asyncio
import gc
import itertools
import json
import math
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.router.served_chats import post
from tests.support.router.served_http import open_http
from tests.support.tokenizers.trained import write_byte_level
from tgis.router.api.http.answers import sliced_encoder
from tgis.router.api.http.answers.sliced_encoder import (
    PART_BYTES,
    SLICE_TOKENS,
)
from tgis.router.api.openai.answers.logprobs import CompletionLogprobsWriter, TokenNames
from tgis.router.api.openai.answers.logprobs_encoder import LogprobsEncoder
from tgis.router.api.openai.completions.types import Completion, CompletionChoice
from tgis.router.sequence import TokenDetail
from tgis.router.text.detokenizer import Vocabulary
from tgis.router.text.tokenizer import Tokenizer

NUM_TOP = 20
LONGEST_HOLD_S = 0.05
HEADER = Completion(id="cmpl-1", created=1, model="\0", choices=[])


@pytest.fixture
def names(tmp_path: Path) -> Iterator[TokenNames]:
    write_byte_level(tmp_path)
    tokenizer = Tokenizer(tmp_path, 1)
    yield TokenNames(Vocabulary(tokenizer))
    tokenizer.close()


def random_tokens(count: int) -> list[TokenDetail]:
    r = random.Random(count)

    def one() -> tuple[int, float]:
        return r.randrange(300), -8 * r.random()

    return [TokenDetail(*one(), 3, tuple(one() for _ in range(NUM_TOP))) for _ in range(count)]


@asynccontextmanager
async def ticking() -> AsyncIterator[list[float]]:
    """Yield a growing list of the thread's CPU time at each turn of the event loop."""
    times: list[float] = []

    async def tick() -> None:
        while True:
            times.append(time.thread_time())
            await asyncio.sleep(0)

    task = asyncio.create_task(tick())
    try:
        yield times
    finally:
        task.cancel()


async def encode_all(turn: asyncio.Lock, names: TokenNames, tokens: list[TokenDetail]) -> Any:
    """Return the responses with a completion and with a chat."""
    encoder = LogprobsEncoder(turn)
    writer = CompletionLogprobsWriter(names, NUM_TOP)
    logprobs = encoder.join(await encoder.completion(tokens, writer, are_first=True))
    prompt = await encoder.prompt(tokens, names, NUM_TOP)
    chat = await encoder.chat(tokens, names, NUM_TOP)
    choice = CompletionChoice(0, "", logprobs, prompt_logprobs=prompt)
    return encoder.answer(msgspec.structs.replace(HEADER, choices=[choice])), encoder.answer(chat)


@pytest.mark.parametrize("count", [0, 1, SLICE_TOKENS, SLICE_TOKENS + 1, 3 * SLICE_TOKENS - 1])
async def test_slices_join_to_the_text_of_the_tokens(names: TokenNames, count: int) -> None:
    tokens = random_tokens(count)
    response, chat = await encode_all(asyncio.Lock(), names, tokens)
    sent, sent_chat = await body_of(response), await body_of(chat)
    answer, content = json.loads(sent), json.loads(sent_chat)["content"]
    assert (answer["model"], len(answer["choices"])) == (HEADER.model, 1)
    logprobs, prompt = answer["choices"][0]["logprobs"], answer["choices"][0]["prompt_logprobs"]
    expected = [token.logprob for token in tokens]
    assert logprobs["token_logprobs"] == [None, *expected[1:]][:count]
    assert logprobs["tokens"] == [names.of(token.token_id) for token in tokens]
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert [len(logprobs[field]) for field in ("text_offset", "top_logprobs")] == [count, count]
    assert [
        each and each[str(token.token_id)]["logprob"] for each, token in zip(prompt, tokens, strict=True)
    ] == [None, *expected[1:]][:count]
    assert [each["logprob"] for each in content] == expected
    tops = [[top["logprob"] for top in each["top_logprobs"]] for each in content]
    assert tops == [[logprob for _, logprob in token.top_tokens] for token in tokens]


async def body_of(response: Any) -> bytes:
    """Return the body that a server would receive."""
    messages: asyncio.Queue[Any] = asyncio.Queue()
    await response({"type": "http"}, None, messages.put)
    assert messages.get_nowait()["status"] == 200
    parts = [messages.get_nowait()["body"] for _ in range(messages.qsize())]
    assert max(map(len, parts)) <= 2 * PART_BYTES
    assert response.headers["content-length"] == str(sum(map(len, parts)))
    return b"".join(parts)


async def test_one_slice_of_all_answers_is_encoded_in_a_turn_of_the_loop(names: TokenNames) -> None:
    turn, tokens = asyncio.Lock(), random_tokens(4 * SLICE_TOKENS)
    num_slices = 5 * 3 * 4
    async with ticking() as times:
        await asyncio.gather(*(encode_all(turn, names, tokens) for _ in range(5)))
    assert len(times) >= num_slices


@pytest.mark.slow
async def test_long_answers_hold_up_nothing(names: TokenNames) -> None:
    turn, tokens = asyncio.Lock(), random_tokens(8192)
    gc.freeze()  # a router's collector has no objects of tests
    async with ticking() as times:
        await encode_all(turn, names, tokens)
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < LONGEST_HOLD_S


async def test_a_long_answer_arrives_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_encoder, "PART_BYTES", 4 << 10)
    prompt = random.Random(1).choices(range(5, 300), k=190)
    body = {"prompt": prompt, "max_tokens": 2, "n": 3, "prompt_logprobs": 3, "echo": True, "logprobs": 3}
    async with open_http(tmp_path) as served:
        status, answer = await post(served, "/v1/completions", body)
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice in answer["choices"]:
        pairs = zip(choice["prompt_logprobs"][1:], prompt[1:], strict=True)
        # The fake shard's ranks are positions.
        assert [each[str(token_id)]["rank"] for each, token_id in pairs] == list(range(1, len(prompt)))
        logprobs = choice["logprobs"]["token_logprobs"]
        assert logprobs[0] is None
        assert len(logprobs) == len(prompt) + 2
        assert all(map(math.isfinite, logprobs[1:]))
