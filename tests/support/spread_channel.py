"""gRPC channel over several connections, so that one client's calls reach several router workers."""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import grpc

from tests.support.connections import OWN_CONNECTION

NUM_CONNECTIONS = 6
"""Number of connections: the probability that all reach the same of three workers is 1/243."""
CONNECT_S = 20.0


def spread_channel(target: str) -> grpc.Channel:
    """Open a channel whose connections are all established, so that later measurements of the router include
    them."""
    channels = [grpc.insecure_channel(target, OWN_CONNECTION) for _ in range(NUM_CONNECTIONS)]
    for channel in channels:
        grpc.channel_ready_future(channel).result(CONNECT_S)
    return SpreadChannel(channels)


class SpreadChannel(grpc.Channel):
    """Channel that uses the next connection for each call."""

    def __init__(self, channels: Sequence[grpc.Channel]) -> None:
        self._channels = channels

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return _Spread([channel.unary_unary(*args, **options) for channel in self._channels])

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return _Spread([channel.unary_stream(*args, **options) for channel in self._channels])

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return _Spread([channel.stream_unary(*args, **options) for channel in self._channels])

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return _Spread([channel.stream_stream(*args, **options) for channel in self._channels])

    def subscribe(
        self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool = False
    ) -> None:
        self._channels[0].subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        self._channels[0].unsubscribe(callback)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> "SpreadChannel":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Spread:
    """Callables of gRPC's stubs that use the connections in turn."""

    def __init__(self, calls: Sequence[Any]) -> None:
        self._next: Iterator[Any] = cycle(calls)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return next(self._next)(*args, **options)

    def future(self, *args: Any, **options: Any) -> Any:
        return next(self._next).future(*args, **options)

    def with_call(self, *args: Any, **options: Any) -> Any:
        return next(self._next).with_call(*args, **options)
