"""Paces the refusals of large requests on each connection. Without pacing, a client that keeps sending
megabytes to be refused would keep the event loop busy with receiving and decoding them."""

import asyncio
from contextlib import suppress

LARGE_BYTES = 32 << 10  # messages up to this size are never paced
BYTES_PER_S = 4 << 20  # maximum rate of refused messages on each connection
MAX_DELAY_S = 4.0
# limit for all waiting refusals together, because gRPC keeps their bytes until they are sent
MAX_WAITING_BYTES = 256 << 20


class RefusalPacing:
    """Pacer of refusals. It remembers only connections with a refusal in the last `max_delay_s`."""

    def __init__(self, bytes_per_s: float = BYTES_PER_S, max_delay_s: float = MAX_DELAY_S) -> None:
        self._bytes_per_s = bytes_per_s
        self._max_delay_s = max_delay_s
        self._due: dict[str, float] = {}
        """Time of the next refusal by peer, in the order of their last refusals."""
        self._num_waiting_bytes = 0
        self._has_ended = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due)

    async def wait(self, peer: str, num_bytes: int) -> None:
        """Wait until a message of `num_bytes` bytes may be refused on the connection to `peer`."""
        if num_bytes <= LARGE_BYTES:
            return
        delay = self.delay(peer, num_bytes, asyncio.get_running_loop().time())
        if not delay or self._num_waiting_bytes + num_bytes > MAX_WAITING_BYTES:
            return
        self._num_waiting_bytes += num_bytes
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_ended.wait(), delay)
        finally:
            self._num_waiting_bytes -= num_bytes

    def delay(self, peer: str, num_bytes: int, now: float) -> float:
        """Return how many seconds a refusal must wait, at most `max_delay_s`. `now` never decreases."""
        due = max(self._due.pop(peer, now), now)
        self._due[peer] = min(due + num_bytes / self._bytes_per_s, now + self._max_delay_s)
        # The past due times are at the front, because the last refusals are at most `max_delay_s` old.
        while self._due and next(iter(self._due.values())) <= now:
            del self._due[next(iter(self._due))]
        return due - now

    def end(self) -> None:
        """Release all waiting refusals, and stop pacing."""
        self._has_ended.set()
