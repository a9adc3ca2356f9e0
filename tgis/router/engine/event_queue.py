"""Passes events from the engine to the tasks that serve clients."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from tgis.router.engine.handle import RequestTimes
from tgis.router.events import Ended, Event, Failed, TimedOut

MAX_WAKE_UPS_PER_TURN = 64
"""Maximum number of readers to wake in one turn of the event loop. An idle loop wakes the rest immediately. A
busy loop first handles shard replies that have arrived, so that the other readers get those tokens too."""

Arrival = asyncio.Future[None]
_FINAL = (Ended, Failed, TimedOut)  # built once, because every read needs it


class WakeUps:
    """Waker of the readers of all queues of an event loop. It wakes a limited number per turn, in order, so
    that the shards never wait until all readers have sent their answers."""

    def __init__(self) -> None:
        self._arrivals: deque[Arrival] = deque()
        self._num_left = MAX_WAKE_UPS_PER_TURN

    def wake(self, arrival: Arrival) -> None:
        if self._num_left == MAX_WAKE_UPS_PER_TURN:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        if self._num_left:
            self._num_left -= 1
            arrival.set_result(None)
        else:
            self._arrivals.append(arrival)

    def _begin_turn(self) -> None:
        waiting = self._arrivals
        self._num_left = MAX_WAKE_UPS_PER_TURN
        while waiting and self._num_left:
            arrival = waiting.popleft()
            if not arrival.done():  # It is done if its reader was cancelled.
                self.wake(arrival)


class EventReceiver(Protocol):
    def begin(self, times: RequestTimes) -> None:
        """Receive the times of a generation when its first step is sent. A resumed generation that had begun
        earlier does not call this again."""

    def deliver(self, event: Event) -> None: ...


class EventQueue:
    """Queue of a generation's events for one reader, an asynchronous iterator over lists of events. Each list
    has all events that arrived since the previous one, in order. No list is empty, and the last list ends
    with the final event."""

    __slots__ = ("_arrival", "_arrived", "_is_read", "_wake")

    def __init__(self, wake: Callable[[Arrival], None]) -> None:
        """`wake` sets the result of the future that the reader awaits, immediately or in a later turn."""
        self._wake = wake
        self._arrived: list[Event] = []
        self._arrival: Arrival | None = None
        """Future that the reader awaits, or None if it is not waiting."""
        self._is_read = False
        """True once the reader has the final event."""

    def begin(self, times: RequestTimes) -> None:
        """Do nothing, because the final event has the times."""

    def deliver(self, event: Event) -> None:
        self._arrived.append(event)
        arrival = self._arrival
        if arrival is not None:
            self._arrival = None
            if not arrival.done():  # It is done if the reader was cancelled.
                self._wake(arrival)

    def __aiter__(self) -> "EventQueue":
        return self

    async def __anext__(self) -> list[Event]:
        """Return all events that have arrived. If there are none, wait for one."""
        if self._is_read:
            raise StopAsyncIteration
        if not self._arrived:
            self._arrival = arrival = asyncio.get_running_loop().create_future()
            await arrival
        events, self._arrived = self._arrived, []
        self._is_read = isinstance(events[-1], _FINAL)
        return events
