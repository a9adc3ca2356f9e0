"""Both clients of tgis_client with one interface, so that a test holds for each."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

from tgis_client import AsyncClient, AsyncStream, Client, Generation

OpenClient = Callable[..., Any]
"""Opens a client as a context manager, with the arguments of Client."""


class BlockingStream(Iterator[Generation]):
    def __init__(self, runner: asyncio.Runner, stream: AsyncStream) -> None:
        self._runner, self._stream = runner, stream

    def __next__(self) -> Generation:
        try:
            return self._runner.run(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        self._runner.run(self._stream.aclose())

    @property
    def result(self) -> Generation:
        return self._stream.result


class BlockingClient:
    """AsyncClient whose methods block."""

    def __init__(self, runner: asyncio.Runner, client: AsyncClient) -> None:
        self._runner, self._client = runner, client

    def stream(self, *arguments: Any, **more: Any) -> BlockingStream:
        return BlockingStream(self._runner, self._client.stream(*arguments, **more))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *arguments, **more: self._runner.run(method(*arguments, **more), context=copy_context())


@contextmanager
def open_blocking(*arguments: Any, **settings: Any) -> Iterator[BlockingClient]:
    with asyncio.Runner() as runner:
        client = AsyncClient(*arguments, **settings)
        yield BlockingClient(runner, client)
        runner.run(client.aclose())


CLIENTS: dict[str, OpenClient] = {"sync": Client, "async": open_blocking}
