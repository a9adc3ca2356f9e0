"""Live request: an accepted sequence, its times, and the receiver of its events."""

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
    """None if a router worker looks for stop sequences."""
    events: EventReceiver
    inputs: list[TokenDetail] = field(default_factory=list)
    times: RequestTimes = field(default_factory=RequestTimes)
    awaits_first: bool = True
    """True until its first token, and again until the first one after a loss of the shards."""
    expiry: asyncio.TimerHandle | None = None
    token_timer: asyncio.TimerHandle | None = None
    """Timer that TokenTimeouts keeps for its next token."""

    def reason_of_last(self, now: float) -> StopReason:
        """Return why the sequence ends with the last token that it has, if it has generated any."""
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
        """Deliver the encoder's input tokens if the client asked for input tokens. No model output predicts
        them, so the shards have no details of them."""
        sequence, details = self.sequence, self.sequence.details
        if details.input_tokens and sequence.encoder_token_ids and not sequence.num_inputs_reported:
            logprob = math.nan if details.logprobs else 0.0
            tokens = (TokenDetail(token_id, logprob) for token_id in sequence.encoder_token_ids)
            self.events.deliver(InputTokens(tuple(tokens)))

    def resume(self, progress: Progress) -> None:
        """Continue a generation of another engine process, before the engine has it."""
        self.sequence.resume(progress.generated, progress.has_inputs)
        self.times = progress.times
