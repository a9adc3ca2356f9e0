"""Live request: an accepted sequence, its times, and its events on their way to the client."""

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass, field

from tgis.router.events import Event, InputTokens, Timings
from tgis.router.sequence import Sequence, TokenDetail
from tgis.router.text.stop_sequences import TextStream


@dataclass(eq=False)
class LiveRequest:
    sequence: Sequence
    text: TextStream
    events: deque[Event] = field(default_factory=deque)
    arrival: asyncio.Future[None] | None = None
    """Future that the client's task awaits."""
    inputs: list[TokenDetail] = field(default_factory=list)
    accepted_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    """Time of its first step."""
    first_token_at: float | None = None
    last_token_at: float = 0.0
    expiry: asyncio.TimerHandle | None = None

    def deliver(self, event: Event) -> None:
        self.events.append(event)
        if self.arrival is not None and not self.arrival.done():
            self.arrival.set_result(None)

    async def next_event(self) -> Event:
        """Return the next event in order, and wait for it if need be. Only one task may call this."""
        if not self.events:
            self.arrival = asyncio.get_running_loop().create_future()
            await self.arrival
        return self.events.popleft()

    def deliver_encoder_inputs(self) -> None:
        """Deliver the encoder's input tokens if the client asked for input tokens. No model output predicts
        them, so the shards have no details of them."""
        sequence, details = self.sequence, self.sequence.details
        if details.input_tokens and sequence.encoder_token_ids:
            logprob = math.nan if details.logprobs else 0.0
            tokens = (TokenDetail(token_id, logprob) for token_id in sequence.encoder_token_ids)
            self.deliver(InputTokens(tuple(tokens)))

    def timings(self, now: float) -> Timings:
        started_at, begin = now if self.started_at is None else self.started_at, self.accepted_at
        first = None if self.first_token_at is None else self.first_token_at - begin
        return Timings(started_at - begin, first, now - begin)
