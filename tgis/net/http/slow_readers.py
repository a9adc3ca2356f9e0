"""Implements a connection's flow control: it pauses reading, and ends responses to clients that do not
read."""

import asyncio
from collections.abc import Callable


class SlowReadError(Exception):
    """Error for sending to a client that has not read for too long; its connection ends."""


class Flow:
    """Flow control of a connection; `drain` raises SlowReadError after `give_up`.

    Reading is paused while the app asks for it, and while there is unparsed input."""

    is_slow = False

    def __init__(self, transport: asyncio.Transport, on_resume: Callable[[], None]) -> None:
        """`on_resume` is called when the app resumes reading."""
        self._transport = transport
        self._on_resume = on_resume
        self.read_paused = False
        self.write_paused = False
        self._is_paused = False
        self._has_backlog = False
        self._is_writable = asyncio.Event()
        self._is_writable.set()

    def pause_reading(self) -> None:
        self.read_paused = True
        self._update()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._update()
            self._on_resume()

    def hold_reading(self, has_backlog: bool) -> None:
        """Pause reading while there is unparsed input."""
        self._has_backlog = has_backlog
        self._update()

    def _update(self) -> None:
        is_paused = self.read_paused or self._has_backlog
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            self._transport.pause_reading() if is_paused else self._transport.resume_reading()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._is_writable.clear()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._is_writable.set()

    def give_up(self) -> None:
        self.is_slow = True
        self._is_writable.set()

    async def drain(self) -> None:
        await self._is_writable.wait()
        if self.is_slow:
            raise SlowReadError
