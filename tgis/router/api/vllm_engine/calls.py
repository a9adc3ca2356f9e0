"""Keeps the calls that are generating, so that clients can abort them by their request ids."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from tgis.router.engine.handle import CallName

T = TypeVar("T")


class AbortedError(Exception):
    """Raised at the end of an aborted call's responses."""


class _Call:
    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a call runs in a task"
        self.task = task
        self.is_aborted = self.is_sending = False

    def abort(self) -> None:
        """End the call when it next waits for a response. A call that is cancelled while it sends one would
        get no status."""
        self.is_aborted = True
        if not self.is_sending:
            self.task.cancel()


class LiveCalls:
    def __init__(self) -> None:
        self._calls: dict[CallName, set[_Call]] = {}

    async def run(self, name: CallName, responses: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Yield a call's responses until an abort ends them, which raises AbortedError. Several calls may
        have the same name, and an abort ends all of them."""
        call = _Call()
        self._calls.setdefault(name, set()).add(call)
        try:
            async with aclosing(responses):
                async for response in responses:
                    call.is_sending = True
                    yield response
                    call.is_sending = False
                    if call.is_aborted:
                        raise AbortedError
        except asyncio.CancelledError:
            if call.is_aborted and not call.is_sending and not call.task.uncancel():
                raise AbortedError from None
            raise  # the client has cancelled the call
        finally:
            self._calls[name].discard(call)
            if not self._calls[name]:
                del self._calls[name]

    def abort(self, name: CallName) -> bool:
        """Abort the calls with a name. Return False if there is none."""
        calls = [call for call in self._calls.get(name, ()) if not call.is_aborted]
        for call in calls:
            call.abort()
        return bool(calls)
