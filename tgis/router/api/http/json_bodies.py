"""Reads bodies of requests, which are JSON. Of those with many values each waits for its turn."""

import asyncio
import re
from collections.abc import Hashable
from typing import TypeVar

import msgspec

from tgis.process.fair_queue import FairQueue
from tgis.router.api.http.json_structure import BodyLimits, Weight, check_structure
from tgis.router.errors import OVERLOADED, OverloadedError, RequestError

LONG_BYTES = 256 << 10  # of a body whose structure another thread looks at
MAX_WAITING = 1_024
# Time between the turns of two heavy bodies, about twice what the first one keeps the event loop busy.
S_PER_LIST, S_PER_VALUE = 10e-6, 1e-6

T = TypeVar("T")


class Turns:
    """Spaces out the building of heavy bodies, whose owners take turns, so that others are served between."""

    def __init__(self) -> None:
        self._queue: FairQueue[tuple[asyncio.Future[None], Weight]] = FairQueue(MAX_WAITING)
        self._serving: asyncio.Task[None] | None = None

    async def wait(self, owner: Hashable, weight: Weight) -> None:
        """Wait until it is the turn of a body of this weight. Raises OverloadedError if too many wait."""
        turn = asyncio.get_running_loop().create_future()
        item = turn, weight
        for refused, _ in self._queue.push(owner, item, 1):
            refused.set_exception(OverloadedError(OVERLOADED))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve(), name="turns")
        try:
            await turn
        except asyncio.CancelledError:
            self._queue.remove(owner, item)
            raise

    async def _serve(self) -> None:
        while self._queue:
            turn, weight = self._queue.pop()
            if not turn.done():
                turn.set_result(None)
                await asyncio.sleep(S_PER_LIST * weight.num_lists + S_PER_VALUE * weight.num_values)


class BodyReader:
    """Reader of the bodies of a port."""

    def __init__(self, max_bytes: int, limits: BodyLimits) -> None:
        self.max_bytes = max_bytes
        self._limits, self._turns, self._look = limits, Turns(), asyncio.Lock()

    async def check(self, body: bytes, owner: Hashable) -> None:
        """Check a body before anything is built of it, and wait for its turn if that takes long. Raises
        RequestError and OverloadedError."""
        if len(body) <= LONG_BYTES:
            weight = check_structure(body, self._limits)
        else:
            async with self._look:  # the columns take several times as much memory as the body
                weight = await asyncio.to_thread(check_structure, body, self._limits)
        if weight.is_heavy:
            await self._turns.wait(owner, weight)


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Return the request in a body. Raises RequestError, which names the field and quotes no value of it."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `")
        param = path.rstrip("`").removeprefix("$.")
        field = re.sub(r"\.?\[.*", "", param)
        shown = f"{field}: {text}" if field else f"the body: {text}"
        raise RequestError(shown, field) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RequestError("the body is not valid JSON in UTF-8") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
