"""Defines a live request: an accepted sequence, its times, and the queue that passes its events from the
engine to the task that serves the client."""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tgis.router.engine.handle import Progress, TextSink
from tgis.router.events import Ended, Event, Failed, InputTokens, RequestTimes, TimedOut
from tgis.router.sequence import Sequence, StopReason, TokenDetail

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
        events = self._arrived
        self._arrived = []
        self._is_read = isinstance(events[-1], _FINAL)
        return events


@dataclass(slots=True)
class CallStart:
    """Record of whether the shards have begun any request of a call."""

    is_done: bool = False


@dataclass(eq=False)
class LiveRequest:
    sequence: Sequence
    sink: TextSink | None
    """None if a router worker checks for stop sequences."""
    events: EventReceiver
    inputs: list[TokenDetail] = field(default_factory=list)
    times: RequestTimes = field(default_factory=RequestTimes)
    call_start: CallStart = field(default_factory=CallStart)
    awaits_first: bool = True
    """True until the first token, and after a loss of the shards until the next token."""
    expiry: asyncio.TimerHandle | None = None
    token_timer: asyncio.TimerHandle | None = None
    """Timer of TokenTimeouts for the next token."""
    queue_timer: asyncio.TimerHandle | None = None
    """Timer of QueueTimeout until the first step."""

    def reason_of_last(self, now: float) -> StopReason:
        """Return why the sequence ends with its last generated token, or NOT_FINISHED if it continues."""
        sequence = self.sequence
        num_generated = sequence.num_generated
        if not num_generated:
            return StopReason.NOT_FINISHED
        return sequence.stopping.reason_at(num_generated, sequence.token_ids[-1], now)

    def deliver_end(
        self, token: TokenDetail | None, num_generated: int, reason: StopReason, now: float
    ) -> None:
        times = self.times
        self.events.deliver(Ended(token, num_generated, reason, times.timings(now), times.num_cached))

    def deliver_encoder_inputs(self) -> None:
        """Deliver the encoder's input tokens if the client requested input tokens. The model does not predict
        them, so the shards have no details of them."""
        sequence = self.sequence
        details = self.sequence.details
        if details.input_tokens and sequence.encoder_token_ids and not sequence.num_inputs_reported:
            logprob = math.nan if details.logprobs else 0.0
            tokens = (TokenDetail(token_id, logprob) for token_id in sequence.encoder_token_ids)
            self.events.deliver(InputTokens(tuple(tokens)))

    def resume(self, progress: Progress) -> None:
        """Restore the progress from another engine process, before the engine opens the request."""
        self.sequence.resume(progress.generated, progress.has_inputs)
        self.times = progress.times
        if self.times.started_at is not None:
            self.call_start.is_done = True
