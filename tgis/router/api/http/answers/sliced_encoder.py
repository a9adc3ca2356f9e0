"""Encodes and sends answers with details of many tokens without blocking the event loop."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tgis.router.api.http.answers.event_stream import BEGIN, BODY
from tgis.router.api.http.json_bodies import encode_json
from tgis.router.sequence import TokenDetail

SLICE_TOKENS = 64  # tokens encoded at once; with 20 alternatives each they take a few milliseconds
PART_BYTES = 256 << 10  # bytes of an answer written at once
JSON = "application/json"

T = TypeVar("T")
Slice = Sequence[TokenDetail]


class SlicedEncoder:
    """Encoder of one answer's lists of tokens. All answers share `turn`: each turn of the event loop encodes
    one slice of one answer, so that other requests get their tokens in time."""

    def __init__(self, turn: asyncio.Lock) -> None:
        self._turn = turn
        self._lists: list[Sequence[bytes]] = []

    async def tokens(self, tokens: Slice, encode: Callable[[Slice], bytes]) -> Any:
        """Encode the tokens slice by slice, in order. Return a placeholder for the list."""
        return self.mark(await self.slices(tokens, lambda part, _: encode(part)))

    def answer(self, answer: object) -> Response:
        """Return the response with an answer whose lists this encoder has encoded."""
        text = encode_json(answer)
        num_bytes = sum(map(len, self._splice(text)))
        if num_bytes <= PART_BYTES:
            return Response(b"".join(self._splice(text)), media_type=JSON)
        return PartedAnswer(self.parts(text), num_bytes)

    def parts(self, text: bytes) -> Iterator[bytes]:
        """Yield encoded JSON with all lists in their places, in parts of about PART_BYTES."""
        joined: list[memoryview] = []
        num_bytes = 0
        for piece in self._splice(text):
            for start in range(0, len(piece), PART_BYTES):
                joined.append(piece[start : start + PART_BYTES])
                num_bytes += len(joined[-1])
                if num_bytes >= PART_BYTES:
                    yield b"".join(joined)
                    joined = []
                    num_bytes = 0
        if joined:
            yield b"".join(joined)

    def mark(self, lists: Sequence[bytes]) -> Any:
        """Return a placeholder that an encoded list replaces when the answer is written."""
        self._lists.append(lists)
        return msgspec.Raw(b"\0%d\0" % (len(self._lists) - 1))

    def _splice(self, text: bytes) -> Iterator[memoryview]:
        for index, piece in enumerate(text.split(b"\0")):  # JSON contains no zero byte
            yield from _as_one(self._lists[int(piece)]) if index % 2 else (memoryview(piece),)

    async def slices(self, tokens: Slice, encode: Callable[[Slice, bool], T]) -> list[T]:
        """Return the result of `encode` for each slice. Its second argument is True for the first slice."""
        encoded = []
        for start in range(0, len(tokens), SLICE_TOKENS):
            async with self._turn:
                encoded.append(encode(tokens[start : start + SLICE_TOKENS], start == 0))
                await asyncio.sleep(0)
        return encoded


class PartedAnswer(Response):
    """Long answer sent in parts. Each part is sent once the client has read the parts before it."""

    def __init__(self, parts: Iterable[bytes], num_bytes: int) -> None:
        super().__init__(media_type=JSON)
        self.headers["content-length"] = str(num_bytes)
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": BEGIN, "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            await send({"type": BODY, "body": part, "more_body": True})
            await asyncio.sleep(0)  # let other tasks run even if the client reads fast
        await send({"type": BODY, "body": b"", "more_body": False})


def _as_one(lists: Iterable[bytes]) -> Iterator[memoryview]:
    """Yield encoded lists joined into one list, without copying them."""
    before = b"["
    for each in lists:
        if len(each) > len(b"[]"):
            yield memoryview(before)
            yield memoryview(each)[1:-1]
            before = b","
    yield memoryview(b"[]" if before == b"[" else b"]")
