"""A router whose engine, adapters, concurrency limit and client of the shards are in another process, over a
socket pair. Run like `python -m tgis`."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.support.router.split_handle import SplitHandle, pack, unpack
from tgis.cli.main import main
from tgis.config.processes import RouterConfig
from tgis.router import app
from tgis.router.metrics.metrics import Metrics


class SplitEngine:
    """Implements EngineHost."""

    def __init__(self, config: RouterConfig, metrics: Metrics, on_ready: Callable[[bool], None]) -> None:
        self._on_ready = on_ready
        (self._messages, theirs), (self._scrapes, their_scrapes) = socket.socketpair(), socket.socketpair()
        numbers = (theirs.fileno(), their_scrapes.fileno())
        module = "tests.support.router.split_engine"
        self._process = subprocess.Popen([sys.executable, "-m", module, *map(str, numbers)], pass_fds=numbers)
        theirs.close(), their_scrapes.close()
        self._writer: asyncio.StreamWriter | None = None
        self._unsent = [pack((config,))]
        self.handle = SplitHandle(self._send)
        self._started: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._connection = asyncio.create_task(self._connect())
        self._own_metrics = metrics.render
        metrics.render = self._render  # type: ignore[method-assign]

    @property
    def num_live(self) -> int:
        return sum(not opened.is_over for opened in self.handle.opened.values())

    async def start(self) -> None:
        self._send("start")
        self.handle.engine_info = await self._started

    async def run(self) -> None:
        self._send("run")
        try:
            await asyncio.shield(self._connection)
            raise RuntimeError("the engine's process has ended")
        finally:
            self._end_messages()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._connection), 10)

    def give_up(self) -> None:
        self._send("give_up")

    async def close(self) -> None:
        self._end_messages()
        await asyncio.wait((self._connection,), timeout=10)
        self._scrapes.close()
        if self._writer is not None:
            self._writer.close()
        await asyncio.to_thread(self._process.wait, 10)

    def _send(self, *message: Any) -> None:
        if not self._unsent and self._writer is not None:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(pack(message))

    def _flush(self) -> None:
        """Send together what was said in one turn of the loop: what arrives together starts together."""
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(b"".join(self._unsent))
        self._unsent.clear()

    def _end_messages(self) -> None:
        """The other half ends when it has read everything."""
        if self._writer is not None:
            self._flush()
        with contextlib.suppress(OSError):
            self._messages.shutdown(socket.SHUT_WR)

    async def _connect(self) -> None:
        """Take in messages until the other half has ended."""
        reader, self._writer = await asyncio.open_connection(sock=self._messages)
        self._flush()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                kind, number, value = await unpack(reader)
                if kind == "ready":
                    self._on_ready(value)
                elif kind != "started":
                    self.handle.take(kind, number, value)
                elif isinstance(value, Exception):
                    self._started.set_exception(value)
                else:
                    self._started.set_result(value)

    def _render(self) -> bytes:
        self._scrapes.sendall(b"?")
        size = int.from_bytes(self._scrapes.recv(4, socket.MSG_WAITALL))
        return merge(self._own_metrics(), self._scrapes.recv(size, socket.MSG_WAITALL))


def merge(first: bytes, second: bytes) -> bytes:
    """The sum of two scrapes of the same series, sample by sample."""
    families: dict[str, dict[str, float]] = {}
    for text in (first.decode(), second.decode()):
        for family in text.split("# HELP ")[1:]:
            help_line, type_line, *lines = family.splitlines()
            samples = families.setdefault(f"# HELP {help_line}\n{type_line}", {})
            for name, value in (line.rsplit(" ", 1) for line in lines):
                samples[name] = samples.get(name, 0.0) + float(value)
    parts = []
    for head, samples in families.items():
        parts += [head, *(f"{name} {value}" for name, value in samples.items())]
    return "\n".join([*parts, ""]).encode()


if __name__ == "__main__":
    app.run = partial(app.run, open_engine=SplitEngine)
    main()
