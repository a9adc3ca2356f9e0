"""TGI's API over a real socket, and independent parsers of its responses."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.http_exchange import HttpReply
from tests.support.router.served_http import ServedHttp
from tests.support.router.served_inputs import open_inputs

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@asynccontextmanager
async def open_tgi(directory: Path, **more: Any) -> AsyncIterator[ServedHttp]:
    """Serve the API in front of a shard whose draws depend on seeds."""
    async with open_inputs(directory, "tgi", **more) as served:
        served.scene.shard.model.uses_seeds = True
        yield served


def events_of(stream: HttpReply) -> list[Any]:
    """Return the events of a stream, whose bytes must have exactly TGI's form."""
    *frames, end = stream.body.split(b"\n\n")
    assert end == b""
    assert all(frame.startswith(b"data: {") and b"\n" not in frame for frame in frames)
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]


def text_of(served: ServedHttp, token_ids: list[int]) -> str:
    text: str = served.tokenizer.fast.decode(token_ids)
    return text.rstrip(REPLACEMENT)


def joined(tokens: list[Any]) -> str:
    return "".join(token["text"] for token in tokens if not token["special"])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):  # for failures, not for slow machines
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
