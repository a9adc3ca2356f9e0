"""Defines a live request: an accepted sequence, its times, and the receiver of its events."""

import asyncio
import math
from dataclasses import dataclass, field

from tgis.router.engine.event_queue import EventReceiver
from tgis.router.engine.handle import Progress, RequestTimes, TextSink
from tgis.router.events import Ended, InputTokens
from tgis.router.sequence import Sequence, StopReason, TokenDetail


@dataclass(eq=False)
class LiveRequest:
    sequence: Sequence
    sink: TextSink | None
    """None if a router worker checks for stop sequences."""
    events: EventReceiver
    inputs: list[TokenDetail] = field(default_factory=list)
    times: RequestTimes = field(default_factory=RequestTimes)
    awaits_first: bool = True
    """True until the first token, and after a loss of the shards until the next token."""
    expiry: asyncio.TimerHandle | None = None
    token_timer: asyncio.TimerHandle | None = None
    """Timer of TokenTimeouts for the next token."""

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
        sequence, details = self.sequence, self.sequence.details
        if details.input_tokens and sequence.encoder_token_ids and not sequence.num_inputs_reported:
            logprob = math.nan if details.logprobs else 0.0
            tokens = (TokenDetail(token_id, logprob) for token_id in sequence.encoder_token_ids)
            self.events.deliver(InputTokens(tuple(tokens)))

    def resume(self, progress: Progress) -> None:
        """Restore the progress from another engine process, before the engine opens the request."""
        self.sequence.resume(progress.generated, progress.has_inputs)
        self.times = progress.times
