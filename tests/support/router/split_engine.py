"""The engine's half of a handle in another process: answers the messages of a SplitHandle with a LocalEngine.
Run with the descriptors of two sockets, one for messages and one for scrapes."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvloop

from tests.support.router.split_handle import pack, unpack
from tgis.cli.main import _begin
from tgis.config.processes import RouterConfig
from tgis.errors import OperatorError
from tgis.router.configured_metrics import open_metrics
from tgis.router.engine.handle import SequenceId, Ticket
from tgis.router.engine.local_engine import LocalEngine
from tgis.router.errors import RouterError
from tgis.router.metrics.resource_counts import check_balance


class SplitServer:
    """Numbers are the door's; those of the engine's own handle never cross."""

    def __init__(self, config: RouterConfig, send: Callable[[str, int, Any], None]) -> None:
        self._send, self.metrics = send, open_metrics(config)
        self.engine = LocalEngine(config, self.metrics, lambda is_ready: send("ready", 0, is_ready))
        self._tickets: dict[int, Ticket] = {}
        self._leases: dict[int, asyncio.Task[None]] = {}
        self._sequences: dict[int, SequenceId] = {}
        self._pumps: dict[int, asyncio.Task[None]] = {}
        self.running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        try:
            await self.engine.start()
            self._send("started", 0, self.engine.handle.info())
        except OperatorError as error:
            self._send("started", 0, error)

    async def run(self) -> None:
        self.running = asyncio.create_task(self.engine.run())

    async def give_up(self) -> None:
        self.engine.give_up()

    async def acquire(self, number: int, count: int) -> None:
        try:
            self._tickets[number] = await self.engine.handle.acquire(count)
            self._send("answer", number, None)
        except RouterError as error:
            self._send("answer", number, error)

    async def lease(self, number: int, *ids: Any) -> None:
        async def lease() -> None:
            try:
                self._send("answer", number, await self.engine.handle.lease(self._tickets[number], *ids))
            except RouterError as error:
                self._send("answer", number, error)

        self._leases[number] = asyncio.create_task(lease())

    async def open(self, ticket: int, number: int, spec: Any, resume: Any) -> None:
        sequence_id = self.engine.handle.open(self._tickets[ticket], spec, None, resume)

        async def pump() -> None:
            async for events in self.engine.handle.events(sequence_id):
                for event in events:
                    self._send("event", number, event)

        self._sequences[number] = sequence_id
        self._pumps[number] = asyncio.create_task(pump())

    async def cancel(self, number: int, keep: int | None) -> None:
        if number in self._sequences:
            self.engine.handle.cancel(self._sequences[number], keep)
            if keep is None:
                self._pumps.pop(number).cancel()
                del self._sequences[number]

    async def release(self, number: int) -> None:
        if (task := self._leases.pop(number, None)) is not None and not task.done():
            task.cancel()
            await asyncio.wait((task,))
        if (ticket := self._tickets.pop(number, None)) is not None:
            self.engine.handle.release(ticket)

    async def close(self) -> None:
        for task in (*self._leases.values(), *self._pumps.values()):
            task.cancel()
        for number in list(self._tickets):
            await self.release(number)
        if self.running is not None:
            self.running.cancel()
            await asyncio.wait((self.running,))
            await check_balance(self.metrics.resource_counts)
        await self.engine.close()
        if self.running is not None and not self.running.cancelled():
            self.running.result()


async def serve(messages: socket.socket, scrapes: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=messages)
    [config] = await unpack(reader)
    _begin(config)
    server = SplitServer(config, lambda *message: writer.write(pack(message)))
    server.metrics.tasks.follow(lambda: len(asyncio.all_tasks()))

    def scrape() -> None:
        if scrapes.recv(1):
            text = server.metrics.render()
            scrapes.sendall(len(text).to_bytes(4) + text)
        else:
            asyncio.get_running_loop().remove_reader(scrapes)

    asyncio.get_running_loop().add_reader(scrapes, scrape)
    tasks = []
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            kind, *values = await unpack(reader)
            work = getattr(server, kind)(*values)
            if kind == "start":
                tasks.append(asyncio.create_task(work))
            else:
                await work
            if kind == "run":  # if the engine fails, so does its process, and the router at the other end
                assert server.running is not None
                server.running.add_done_callback(lambda _: writer.transport.abort())
    for task in tasks:
        task.cancel()
        await asyncio.wait((task,))
    await server.close()
    writer.close()


if __name__ == "__main__":
    first, second = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    uvloop.run(serve(first, second))
