"""Runs an engine process and the router workers that use it; each that dies or hangs is restarted alone."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Sequence
from typing import Protocol

from tgis.launcher.local_node import run_all
from tgis.launcher.plan import LaunchError
from tgis.launcher.shard_group import MAX_CRASHES, add_crash, backoff_s
from tgis.process.child import GIVE_UP, Child, End

logger = logging.getLogger(__name__)

ENDED = End("the router has ended", is_success=True)


class Router(Protocol):
    """The router's process, or all of them."""

    async def start(self) -> None: ...

    async def wait(self) -> End:
        """Wait until the router has ended and return its end. The caller may cancel."""

    def signal(self, number: signal.Signals) -> None:
        """Tell the router to drain, or that the shards will not be restarted."""

    async def kill(self) -> None: ...


class RouterGroup:
    """Implements Router. It ends when all of its processes were told to end, or when one fails for good."""

    def __init__(self, make_engine: Callable[[], Child], make_workers: Sequence[Callable[[], Child]]) -> None:
        """Take makers of children that are not started yet, of which each start of a process needs one."""
        self._engine = _KeptProcess(make_engine)
        self._workers = [_KeptProcess(make) for make in make_workers]
        self._running: asyncio.Task[End] | None = None

    async def start(self) -> None:
        self._running = asyncio.create_task(self._run(), name="router")

    async def wait(self) -> End:
        assert self._running is not None, "wait comes after start"
        return await asyncio.shield(self._running)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal that ends the workers. The engine process gets it only if it is GIVE_UP: workers that
        drain need the engine until they have ended."""
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


class _KeptProcess:
    """A process that is started again whenever it ends, until it is told to end."""

    def __init__(self, make: Callable[[], Child]) -> None:
        self._make = make
        self._child: Child | None = None
        self._has_served = False
        self._ending = asyncio.Event()
        self._last_signal = signal.SIGTERM
        self._crashes: list[float] = []

    async def run(self) -> None:
        """Keep the process running until `end`. Raises LaunchError after a refusal at the start or too many
        crashes."""
        while not self._ending.is_set():
            end = await self._run_once()
            if not self._ending.is_set():
                self._count_crash(end)
                await self._back_off()

    def end(self, number: signal.Signals) -> None:
        """Send a signal that ends the process, and start it no more."""
        self._last_signal = number
        self._ending.set()
        if self._child is not None:
            self._child.signal(number)

    async def kill(self) -> None:
        if self._child is not None:
            await self._child.kill()

    async def _run_once(self) -> End:
        child = self._child = self._make()
        await child.start()
        if self._ending.is_set():  # the signal came before there was a process that could get it
            child.signal(self._last_signal)
        end = await child.wait()
        self._has_served |= child.serving.is_set()
        return end

    def _count_crash(self, end: End) -> None:
        """Log the end of the process. Raises LaunchError if it must not be started again."""
        if end.is_refusal and not self._has_served:
            raise LaunchError(end.text)
        self._crashes = add_crash(self._crashes)
        if len(self._crashes) > MAX_CRASHES:
            raise LaunchError(f"{end.text}; giving up after {MAX_CRASHES} restarts of this process")
        logger.error("%s; starting it again", end.text)

    async def _back_off(self) -> None:
        """Wait before the next start, unless the process is told to end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(backoff_s(len(self._crashes))):
                await self._ending.wait()
