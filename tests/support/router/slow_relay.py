"""Relays data between the ends of a Unix socket in pieces of random sizes at random times."""

import asyncio
import contextlib
import random


class SlowRelay:
    def __init__(self, path: str, target: str, r: random.Random) -> None:
        self.path, self._target, self._random = path, target, r
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._connect, self.path)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            answers, their_writer = await asyncio.open_unix_connection(self._target)
        except OSError:
            writer.close()
            return
        self._writers.append(their_writer)
        for source, target in ((reader, their_writer), (answers, writer)):
            self._tasks.append(asyncio.create_task(self._pass_on(source, target)))

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(self._random.choice([1, 7, 100, 1 << 16])):
                target.write(data)
                if not self._random.randrange(4):
                    await asyncio.sleep(self._random.choice([0, 0, 0, 0.004]))  # a step takes 0.001 s
        target.close()

    async def cut(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        self._tasks, self._writers = [], []

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()
