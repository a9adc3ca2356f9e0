"""Shares gRPC channels among calls."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from tgis.load.apis.interface import LoadTarget
from tgis.load.errors import AnswerError

Channel = TypeVar("Channel")
UNAVAILABLE = "UNAVAILABLE"


@dataclass(eq=False)
class _Shared(Generic[Channel]):
    channel: Channel
    num_open: int = 0
    num_calls: int = 0


class ChannelPool(Generic[Channel]):
    """Channels to one service, with a connection each. A call has a channel of its own as long as there are
    not more calls than channels."""

    def __init__(
        self,
        target: LoadTarget,
        open_channel: Callable[[], Channel],
        close_channel: Callable[[Channel], Awaitable[None]],
    ) -> None:
        self._limit = target.calls_per_connection
        self._open = open_channel
        self._close = close_channel
        self._shared = [_Shared(open_channel()) for _ in range(target.num_channels)]

    @property
    def channels(self) -> list[Channel]:
        return [one.channel for one in self._shared]

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Channel]:
        """Yield the channel with the fewest open calls.

        A channel that is UNAVAILABLE is replaced, so that the next call does not wait for gRPC's back-off."""
        used = min(self._shared, key=lambda one: (one.num_open, one.num_calls))
        used.num_open += 1
        used.num_calls += 1
        if used.num_calls == self._limit:
            self._replace(used)
        try:
            yield used.channel
        except AnswerError as error:
            if error.kind == UNAVAILABLE:
                self._replace(used)
            raise
        finally:
            used.num_open -= 1
            if used not in self._shared and not used.num_open:
                await self._close(used.channel)

    def _replace(self, used: _Shared[Channel]) -> None:
        if used in self._shared:
            self._shared[self._shared.index(used)] = _Shared(self._open())

    async def close(self) -> None:
        for one in self._shared:
            await self._close(one.channel)
