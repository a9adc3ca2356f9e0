"""Tests the comments of an idle stream: when they are sent, and when not."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tgis.net.http.slow_readers import SlowReadError
from tgis.router.api.http.answers.event_stream import COMMENT, EventStream
from tgis.router.errors import SlowClientError

pytestmark = pytest.mark.usefixtures("steady_clock")

SILENCE_S = 0.02


async def run(events: AsyncGenerator[bytes, None], delays: dict[bytes, float]) -> list[bytes]:
    """Return the messages sent, in order. `delays` are the times that sending takes; negative ones fail."""
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        body = message.get("body", b"begin")
        if not (body == COMMENT and sent[-1] == COMMENT):  # several count as one
            sent.append(body)
        if (delay := delays.get(body, 0.0)) < 0:
            raise SlowReadError
        await asyncio.sleep(delay)

    async def receive() -> Any:
        raise AssertionError("nothing more comes")

    await EventStream(events, silence_s=SILENCE_S)({}, receive, send)
    return sent


async def test_comments_fill_silence() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(5 * SILENCE_S)
        yield b"one"
        await asyncio.sleep(5 * SILENCE_S)
        yield b"two"
        yield b"three"
        await asyncio.sleep(5 * SILENCE_S)

    sent = await run(events(), {})
    assert sent == [b"begin", b"one", COMMENT, b"two", b"three", COMMENT, b""]


async def test_none_while_an_event_is_sent() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"one"
        yield b"two"

    assert await run(events(), {b"one": 5 * SILENCE_S}) == [b"begin", b"one", b"two", b""]


async def test_a_client_that_does_not_read_comments() -> None:
    """The failure is noticed, but only the next event ends the stream."""
    ends = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"one"
        await asyncio.sleep(5 * SILENCE_S)
        try:
            yield b"two"
        except SlowClientError as error:
            ends.append(error)
            raise

    with pytest.raises(SlowReadError):
        await run(events(), {COMMENT: -1, b"two": -1})
    assert len(ends) == 1
