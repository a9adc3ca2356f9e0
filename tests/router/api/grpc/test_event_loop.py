import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from tgis.router.api.grpc.event_loop import COMPLETIONS_READER, GrpcEventLoop


class Completions:
    """Reader like grpc.aio's: takes one byte in a turn."""

    def __init__(self, wake_ups: socket.socket) -> None:
        self._wake_ups = wake_ups
        self.num_turns = 0

    def _handle_events(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._wake_ups.recv(1) == b"1"
        self.num_turns += 1

    def take_one(self, loop: asyncio.AbstractEventLoop) -> None:
        self._handle_events(loop)


def turns_for(num_bytes: int, reader_of: Callable[[Completions], Callable[..., None]]) -> int:
    """Return the number of turns of a reader that finds so many bytes, and then as many again."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    completions = Completions(ours)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(ours, partial(reader_of(completions), loop))
        for _ in range(2):
            theirs.sendall(b"1" * num_bytes)
            await asyncio.sleep(0.05)
        loop.remove_reader(ours)

    with ours, theirs, asyncio.Runner(loop_factory=GrpcEventLoop) as runner:
        runner.run(run())
    return completions.num_turns


def test_operations_that_complete_together_take_one_turn() -> None:
    assert turns_for(1, lambda completions: completions._handle_events) == 2
    assert turns_for(20, lambda completions: completions._handle_events) == 2


def test_other_readers_find_every_byte() -> None:
    assert turns_for(20, lambda completions: completions.take_one) == 40


class RecordingLoop(GrpcEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def add_reader(self, fileobj: Any, callback: Callable[..., Any], *args: Any) -> None:
        if isinstance(callback, partial) and isinstance(fileobj, socket.socket):
            self.names.add(callback.func.__name__)
        super().add_reader(fileobj, callback, *args)


def test_the_installed_grpc_has_such_a_reader() -> None:
    async def serve() -> set[str]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, RecordingLoop)
        server = grpc.aio.server()
        await server.start()
        await server.stop(None)
        return loop.names

    with asyncio.Runner(loop_factory=RecordingLoop) as runner:
        assert runner.run(serve()) == {COMPLETIONS_READER}
