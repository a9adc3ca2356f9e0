"""Events of generations on their way from the engine to the clients' tasks."""

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
_FINAL = (Ended, Failed, TimedOut)  # built once, because every token needs it


class WakeUps:
    """Wakes the readers of all queues of a loop, in order and in parts, so that the shards never wait until
    all readers have sent what they have."""

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
            if not arrival.done():  # else its reader was cancelled
                self.wake(arrival)


class EventReceiver(Protocol):
    def begin(self, times: RequestTimes) -> None:
        """Take in the times of a generation whose first step is sent; once, unless it had begun before."""

    def deliver(self, event: Event) -> None: ...


class EventQueue:
    """Queue of a generation's events, for one reader: an asynchronous iterator of all that has arrived since
    it was asked before, in order. A list is never empty, and the one with the final event is the last."""

    __slots__ = ("_arrival", "_arrived", "_is_read", "_wake")

    def __init__(self, wake: Callable[[Arrival], None]) -> None:
        """`wake` sets the result of the future that the reader awaits, at once or soon."""
        self._wake = wake
        self._arrived: list[Event] = []
        self._arrival: Arrival | None = None
        """Future of a reader that has to be woken."""
        self._is_read = False
        """True if the final event has been read."""

    def begin(self, times: RequestTimes) -> None:
        """Do nothing: the final event has the times."""

    def deliver(self, event: Event) -> None:
        self._arrived.append(event)
        arrival = self._arrival
        if arrival is not None:
            self._arrival = None
            if not arrival.done():  # else the reader was cancelled
                self._wake(arrival)

    def __aiter__(self) -> "EventQueue":
        return self

    async def __anext__(self) -> list[Event]:
        """Return all events that have arrived, and wait for one if there is none."""
        if self._is_read:
            raise StopAsyncIteration
        if not self._arrived:
            self._arrival = arrival = asyncio.get_running_loop().create_future()
            await arrival
        events, self._arrived = self._arrived, []
        self._is_read = isinstance(events[-1], _FINAL)
        return events
