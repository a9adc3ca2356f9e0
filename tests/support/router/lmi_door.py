"""LMI's API over a real socket, and what its models generate."""

import asyncio
import http.client
import json
from collections.abc import AsyncIterator
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


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.body.splitlines()]


@asynccontextmanager
async def lmi_door(directory: Path, formatter: str | None = None, **more: Any) -> AsyncIterator[HttpDoor]:
    renderer = ChatRenderer(ChatTemplate(TEMPLATE))
    try:
        async with open_http_door(
            directory, renderer, http_api="lmi", lmi_output_formatter=formatter, **more
        ) as door:
            door.scene.shard.model.logprob_of = logprob_of
            yield door
    finally:
        renderer.close()


def logprob_of(token_id: int) -> float:
    """Log-probability that the shard tells, which is exact in 32 bits."""
    return -token_id / 64


async def ask(
    door: HttpDoor, body: Any, path: str = "/invocations", method: str = "POST", **headers: str
) -> Answer:
    """Ask with a body of JSON, or of bytes as they are."""
    given = {"content-type": "application/json"}
    given |= {name.replace("__", "-"): value for name, value in headers.items()}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    def send() -> Answer:
        connection = http.client.HTTPConnection(door.url.removeprefix("http://"), timeout=20)
        try:
            connection.request(method, path, content, given)
            response = connection.getresponse()
            told = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, told, response.read())
        finally:
            connection.close()

    return await asyncio.to_thread(send)


def generate(**parameters: Any) -> dict[str, Any]:
    return {"inputs": PROMPT, "parameters": parameters}


def follow(door: HttpDoor, text: str, most: int) -> list[int]:
    """Token ids that the shard generates after a text."""
    inputs: list[int] = door.tokenizer.fast.encode(text).ids
    tokens = list(inputs)
    while len(tokens) < len(inputs) + most and (len(tokens) == len(inputs) or tokens[-1] != EOS):
        tokens.append(next_token(tokens, VOCAB_SIZE))
    return tokens[len(inputs) :]
