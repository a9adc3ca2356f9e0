"""One end of a connection of length-prefixed messages, for a process with an event loop: router and shard, or
router worker and engine process. Messages that are sent in one turn of the loop are written together."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, cast

import msgspec
from google.protobuf.message import DecodeError

from tgis.net.framing import FrameError, FrameReader, frame_body

logger = logging.getLogger(__name__)

# A process hangs if it reads nothing for UNREAD_LIMIT_S while this much data waits for it. The amount alone
# is no sign of that: a worker sends all its resumed requests to a new engine process at once.
MAX_UNSENT_BYTES = 64 << 20
UNREAD_LIMIT_S = 10.0
# It must read nothing between this many checks in turn: one check fails if this process itself stood still.
NUM_READING_CHECKS = 10
UNREADABLE = (FrameError, DecodeError, msgspec.DecodeError)

M = TypeVar("M")


class FramedChannel(asyncio.Protocol, Generic[M]):
    def __init__(
        self,
        name: str,
        encode: Callable[[Any], bytes],
        decode: Callable[[bytes], M],
        on_message: Callable[[M], None],
        on_loss: Callable[[], None],
    ) -> None:
        """Create a channel, whose `name` is logged. `on_message` is called for each message in order, and
        `on_loss` once when the connection ends, unless this side closed it."""
        self._name = name
        self._encode = encode
        self._decode = decode
        self._on_message = on_message
        self._on_loss = on_loss
        self._frames = FrameReader()
        self._unsent: list[bytes] = []
        self._num_written = 0
        self._reading_check: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.push(data):
                if self._transport is None:  # an earlier message has closed it
                    return
                self._on_message(self._decode(body))
        except UNREADABLE as error:
            logger.error("a message between %s cannot be read: %r", self._name, error)
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if self._reading_check is not None:
            self._reading_check.cancel()
        if self._transport is not None:
            self._transport = None
            self._on_loss()

    def send(self, message: Any) -> None:
        """Send a message, unless the connection is closed."""
        if self._transport is None:
            return
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(frame_body(self._encode(message)))

    def send_now(self, messages: Iterable[Any]) -> None:
        """Send messages immediately, after those already queued in this turn."""
        if self._transport is not None:
            self._unsent += [frame_body(self._encode(message)) for message in messages]
            self._flush()

    def close(self) -> None:
        """Close the connection after all sent messages are written."""
        self._flush()
        transport = self._transport
        self._transport = None
        if transport is not None:
            transport.close()

    def abort(self) -> None:
        """Close the connection without writing the rest."""
        transport = self._transport
        self._transport = None
        if transport is not None:
            transport.abort()

    def _flush(self) -> None:
        unsent = b"".join(self._unsent)
        self._unsent = []
        if self._transport is None or not unsent:
            return
        self._transport.write(unsent)
        self._num_written += len(unsent)
        if self._reading_check is None:
            self._check_reading(num_read_before=-1, num_failed=0)

    def _check_reading(self, num_read_before: int, num_failed: int) -> None:
        """Abort the connection if much data waits for the peer and it has read nothing between the last
        NUM_READING_CHECKS checks. `num_failed` is the number of those checks until now."""
        self._reading_check = None
        if self._transport is None or (waiting := self._transport.get_write_buffer_size()) < MAX_UNSENT_BYTES:
            return
        num_read = self._num_written - waiting
        num_failed = num_failed + 1 if num_read == num_read_before else 0
        if num_failed == NUM_READING_CHECKS:
            logger.error(
                "closed a connection between %s: the peer read nothing for %g s", self._name, UNREAD_LIMIT_S
            )
            self._end()
        else:
            delay_s = UNREAD_LIMIT_S / NUM_READING_CHECKS
            self._reading_check = self._loop.call_later(delay_s, self._check_reading, num_read, num_failed)

    def _end(self) -> None:
        assert self._transport is not None
        self._transport.abort()
