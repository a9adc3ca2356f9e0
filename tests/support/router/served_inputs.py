"""Serves TGI's and LMI's APIs, whose requests have `inputs`, over a real socket, and computes the outputs of
their models."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.http_exchange import HttpReply, exchange
from tests.support.router.fake_shard import EOS, VOCAB_SIZE
from tests.support.router.model_of_shard import next_token
from tests.support.router.served_chats import TEMPLATE
from tests.support.router.served_http import ServedHttp, open_http
from tgis.router.chat.renderer import ChatRenderer
from tgis.router.chat.template import ChatTemplate

PROMPT = "The quick brown fox"


@asynccontextmanager
async def open_inputs(directory: Path, http_api: str, **more: Any) -> AsyncIterator[ServedHttp]:
    """Open an API in front of a shard with known log-probabilities."""
    renderer = ChatRenderer(ChatTemplate(TEMPLATE))
    try:
        async with open_http(directory, renderer, http_api=http_api, **more) as served:
            served.scene.shard.model.logprob_of = logprob_of
            yield served
    finally:
        renderer.close()


def logprob_of(token_id: int) -> float:
    """Return the shard's log-probability of a token, which is exact in 32 bits."""
    return -token_id / 64


async def call(
    served: ServedHttp, path: str, body: Any = None, method: str = "POST", **headers: str
) -> HttpReply:
    return await asyncio.to_thread(exchange, served.url + path, body, headers, method)


def inputs(text: str = PROMPT, **parameters: Any) -> dict[str, Any]:
    return {"inputs": text, "parameters": parameters}


def ids_of(served: ServedHttp, text: str) -> list[int]:
    ids: list[int] = served.tokenizer.fast.encode(text).ids
    return ids


def follow(prompt: list[int], max_new_tokens: int) -> list[int]:
    """Return the token ids that the shard generates greedily."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens and (len(tokens) == len(prompt) or tokens[-1] != EOS):
        tokens.append(next_token(tokens, VOCAB_SIZE))
    return tokens[len(prompt) :]
