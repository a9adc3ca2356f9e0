"""Events of one generation on their way from the engine to the client's task."""

import asyncio
from typing import Protocol

from tgis.router.events import Ended, Event, Failed, TimedOut


class EventReceiver(Protocol):
    def deliver(self, event: Event) -> None: ...


class EventQueue:
    """Queue of a generation's events, for one reader: an asynchronous iterator of all that has arrived since
    it was asked before, in order. A list is never empty, and the one with the final event is the last."""

    __slots__ = ("_arrival", "_arrived", "_is_read")

    def __init__(self) -> None:
        self._arrived: list[Event] = []
        self._arrival: asyncio.Future[None] | None = None
        """Future that the reader awaits."""
        self._is_read = False
        """True if the final event has been read."""

    def deliver(self, event: Event) -> None:
        self._arrived.append(event)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def __aiter__(self) -> "EventQueue":
        return self

    async def __anext__(self) -> list[Event]:
        """Return all events that have arrived, and wait for one if there is none."""
        if self._is_read:
            raise StopAsyncIteration
        if not self._arrived:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        events, self._arrived = self._arrived, []
        self._is_read = isinstance(events[-1], Ended | Failed | TimedOut)
        return events
