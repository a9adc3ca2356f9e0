"""TGI's API over a real socket, and independent parsers of its responses."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.http_exchange import HttpReply
from tests.support.router.http_door import HttpDoor
from tests.support.router.inputs_door import inputs_door

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@asynccontextmanager
async def tgi_door(directory: Path, **more: Any) -> AsyncIterator[HttpDoor]:
    """Open the API in front of a shard whose draws depend on seeds."""
    async with inputs_door(directory, "tgi", **more) as door:
        door.scene.shard.model.uses_seeds = True
        yield door


def events_of(stream: HttpReply) -> list[Any]:
    """Return the events of a stream, whose bytes must have exactly TGI's form."""
    *frames, end = stream.body.split(b"\n\n")
    assert end == b""
    assert all(frame.startswith(b"data: {") and b"\n" not in frame for frame in frames)
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]


def text_of(door: HttpDoor, token_ids: list[int]) -> str:
    text: str = door.tokenizer.fast.decode(token_ids)
    return text.rstrip(REPLACEMENT)


def joined(tokens: list[Any]) -> str:
    return "".join(token["text"] for token in tokens if not token["special"])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):  # for failures, not for slow machines
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
