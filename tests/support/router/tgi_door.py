"""TGI's API over a real socket, and plain readings of what it sends."""

import asyncio
import http.client
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.router.chat_door import TEMPLATE
from tests.support.router.fake_shard import EOS, VOCAB_SIZE
from tests.support.router.http_door import HttpDoor, open_http_door
from tests.support.router.model_of_shard import next_token
from tgis.router.chat.renderer import ChatRenderer
from tgis.router.chat.template import ChatTemplate

PROMPT = "The quick brown fox"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Told(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Events of a stream, whose bytes must have TGI's form and nothing between."""
        *frames, end = self.body.split(b"\n\n")
        assert end == b""
        assert all(frame.startswith(b"data: {") and b"\n" not in frame for frame in frames)
        return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]


@asynccontextmanager
async def tgi_door(directory: Path, **more: Any) -> AsyncIterator[HttpDoor]:
    """Open a door to a shard whose log-probabilities are known and whose draws depend on seeds."""
    renderer = ChatRenderer(ChatTemplate(TEMPLATE))
    try:
        async with open_http_door(directory, renderer, http_api="tgi", **more) as door:
            door.scene.shard.model.logprob_of = logprob_of
            door.scene.shard.model.uses_seeds = True
            yield door
    finally:
        renderer.close()


def logprob_of(token_id: int) -> float:
    """Log-probability that the shard tells, which is exact in 32 bits."""
    return -token_id / 64


async def call(door: HttpDoor, path: str, body: Any = None, method: str = "POST", **headers: str) -> Told:
    """Send JSON, or bytes as they are; a header of an empty text is left out."""
    given = {"content-type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()

    def send() -> Told:
        connection = http.client.HTTPConnection(door.url.removeprefix("http://"), timeout=20)
        try:
            connection.request(method, path, content, {name: text for name, text in given.items() if text})
            response = connection.getresponse()
            told = {name.lower(): value for name, value in response.getheaders()}
            return Told(response.status, told, response.read())
        finally:
            connection.close()

    return await asyncio.to_thread(send)


def inputs(text: str = PROMPT, **parameters: Any) -> dict[str, Any]:
    return {"inputs": text, "parameters": parameters}


def ids_of(door: HttpDoor, text: str) -> list[int]:
    ids: list[int] = door.tokenizer.fast.encode(text).ids
    return ids


def follow(prompt: list[int], most: int) -> list[int]:
    """Token ids that the shard generates greedily."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + most and (len(tokens) == len(prompt) or tokens[-1] != EOS):
        tokens.append(next_token(tokens, VOCAB_SIZE))
    return tokens[len(prompt) :]


def text_of(door: HttpDoor, token_ids: list[int]) -> str:
    text: str = door.tokenizer.fast.decode(token_ids)
    return text.rstrip(REPLACEMENT)


def joined(tokens: list[Any]) -> str:
    return "".join(token["text"] for token in tokens if not token["special"])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
