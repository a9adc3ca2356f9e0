"""Reads JSON bodies of requests, and encodes answers. Bodies with many values take turns."""

import asyncio
from collections.abc import Hashable
from typing import Any, TypeVar

import msgspec

from tgis.process.fair_queue import FairQueue
from tgis.router.api.http.fields.invalid_fields import describe_invalid
from tgis.router.api.http.fields.invalid_json import INVALID_JSON, describe_invalid_json
from tgis.router.api.http.json_structure import BodyLimits, Weight, check_structure
from tgis.router.errors import OVERLOADED, OverloadedError, RequestError

LONG_BYTES = 256 << 10  # longer bodies are checked in another thread
MAX_WAITING_BYTES = 256 << 20  # maximum total size of the bodies that wait for one kind of turn
# Time between the turns of two heavy bodies, about twice as long as the first one occupies the event loop.
S_PER_LIST, S_PER_VALUE = 10e-6, 1e-6

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
# Line ends of `str.splitlines` that JSON need not escape. In JSON they occur in strings only.
_NEXT_LINE, _LINE_SEPARATOR, _PARAGRAPH_SEPARATOR = "\x85".encode(), "\u2028".encode(), "\u2029".encode()
# Their first bytes, because searching for a single byte is faster.
_LATIN, _PUNCTUATION = _NEXT_LINE[0], _LINE_SEPARATOR[0]


def encode_json(value: Any) -> bytes:
    """Return a value as JSON that every reader takes as one line."""
    text = _encode(value)
    if text.isascii():
        return text
    if _LATIN in text:
        text = text.replace(_NEXT_LINE, rb"\u0085")
    if _PUNCTUATION in text:
        text = text.replace(_LINE_SEPARATOR, rb"\u2028").replace(_PARAGRAPH_SEPARATOR, rb"\u2029")
    return text


class Turns:
    """Lock that the owners of bodies get in turn."""

    def __init__(self) -> None:
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(MAX_WAITING_BYTES)
        self._is_free = True

    async def take(self, owner: Hashable, num_bytes: int) -> None:
        """Wait for this body's turn, which lasts until `give`. Raises OverloadedError if the waiting bodies
        are too large in total."""
        if self._is_free:
            self._is_free = False
            return
        turn = asyncio.get_running_loop().create_future()
        for refused in self._queue.push(owner, turn, num_bytes):
            if not refused.done():  # It is done if its request was cancelled in this turn of the event loop.
                refused.set_exception(OverloadedError(OVERLOADED))
        try:
            await turn
        except asyncio.CancelledError:
            self._queue.remove(owner, turn)
            if not turn.cancelled() and turn.exception() is None:
                self.give()  # the body had just got its turn
            raise

    def give(self) -> None:
        """End the turn and begin the next one."""
        while self._queue:
            turn = self._queue.pop()
            if not turn.done():
                turn.set_result(None)
                return
        self._is_free = True


class BodyReader:
    """Reader of the bodies that a port receives."""

    def __init__(self, max_bytes: int, limits: BodyLimits) -> None:
        self.max_bytes = max_bytes
        self._limits = limits
        self._looks = Turns()
        self._turns = Turns()

    async def check(self, body: bytes, owner: Hashable) -> None:
        """Check a body before any value of it is built. Wait for the body's turn if building it takes long.
        Raises RequestError and OverloadedError."""
        if len(body) <= LONG_BYTES:
            weight = check_structure(body, self._limits)
        else:
            weight = await self._look(body, owner)
        if weight.is_heavy:
            await self._turns.take(owner, len(body))
            rest_s = S_PER_LIST * weight.num_lists + S_PER_VALUE * weight.num_values
            asyncio.get_running_loop().call_later(rest_s, self._turns.give)

    async def _look(self, body: bytes, owner: Hashable) -> Weight:
        """Check a long body in a thread, one body at a time, because that takes several times its memory. The
        turn lasts until the end of the check, even if the request is cancelled before."""
        await self._looks.take(owner, len(body))
        look = asyncio.create_task(asyncio.to_thread(check_structure, body, self._limits))
        look.add_done_callback(lambda _: self._looks.give())
        return await asyncio.shield(look)


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Return the request in a body. Raises RequestError, which names the field and quotes no value."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        path, text = describe_invalid(error, decoder.type)
        raise RequestError(text, path) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{INVALID_JSON}: {describe_invalid_json(error, body)}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
