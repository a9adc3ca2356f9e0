"""Runs the engine process and the router workers, and restarts each of them that dies or hangs."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Sequence
from typing import Protocol

from tgis.launcher.nodes.local_node import run_all
from tgis.launcher.plan import LaunchError
from tgis.launcher.shard_group import MAX_CRASHES, add_crash, backoff_s
from tgis.process.child import GIVE_UP, Child, End

logger = logging.getLogger(__name__)

ENDED = End("the router has ended", is_success=True)


class Router(Protocol):
    """One or several processes of the router."""

    async def start(self) -> None: ...

    async def wait(self) -> End:
        """Wait until the router has ended, and return its end. The wait may be cancelled."""

    def signal(self, number: signal.Signals) -> None:
        """Send SIGTERM to drain the router, or GIVE_UP if the shards will not be restarted."""

    async def kill(self) -> None: ...


class RouterGroup:
    """Implements Router. It ends when all processes have ended after a signal, or when one fails
    permanently."""

    def __init__(self, make_engine: Callable[[], Child], make_workers: Sequence[Callable[[], Child]]) -> None:
        """Store the factories, which return a new unstarted child for each start of a process."""
        self._engine = _RestartedProcess(make_engine)
        self._workers = [_RestartedProcess(make) for make in make_workers]
        self._running: asyncio.Task[End] | None = None

    async def start(self) -> None:
        self._running = asyncio.create_task(self._run(), name="router")

    async def wait(self) -> End:
        assert self._running is not None, "wait comes after start"
        return await asyncio.shield(self._running)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal that ends the workers.

        The engine process gets only GIVE_UP, because draining workers need it until they have ended."""
        for worker in self._workers:
            worker.end(number)
        if number == GIVE_UP:
            self._engine.end(number)

    async def kill(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,))
        await asyncio.gather(*(process.kill() for process in (self._engine, *self._workers)))

    async def _run(self) -> End:
        try:
            await run_all((self._engine.run(), self._run_workers()))
        except LaunchError as error:
            return End(str(error))
        return ENDED

    async def _run_workers(self) -> None:
        await run_all(worker.run() for worker in self._workers)
        self._engine.end(signal.SIGTERM)


class _RestartedProcess:
    """Process that is restarted whenever it ends, until `end` is called."""

    def __init__(self, make: Callable[[], Child]) -> None:
        self._make = make
        self._child: Child | None = None
        self._has_served = False
        self._ending = asyncio.Event()
        self._crashes: list[float] = []

    async def run(self) -> None:
        """Keep the process running until `end`. Raises LaunchError if it refuses to start or crashes too
        often."""
        while not self._ending.is_set():
            end = await self._run_once()
            if not self._ending.is_set():
                self._count_crash(end)
                await self._back_off()

    def end(self, number: signal.Signals) -> None:
        """Send a signal that ends the process, and do not restart it."""
        self._ending.set()
        if self._child is not None:
            self._child.signal(number)

    async def kill(self) -> None:
        if self._child is not None:
            await self._child.kill()

    async def _run_once(self) -> End:
        child = self._child = self._make()
        await child.start()
        end = await child.wait()
        self._has_served |= child.serving.is_set()
        return end

    def _count_crash(self, end: End) -> None:
        """Log the end of the process. Raises LaunchError if it must not be restarted."""
        if end.is_refusal and not self._has_served:
            raise LaunchError(end.text)
        self._crashes = add_crash(self._crashes)
        if len(self._crashes) > MAX_CRASHES:
            raise LaunchError(f"{end.text}; giving up after {MAX_CRASHES} restarts of this process")
        logger.error("%s; restarting it", end.text)

    async def _back_off(self) -> None:
        """Wait before the next start, or until `end` is called."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(backoff_s(len(self._crashes))):
                await self._ending.wait()
