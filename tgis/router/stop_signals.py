"""Receives the signals that end the router."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from tgis.process.child import GIVE_UP


class StopSignals:
    """Record of the signals. The first SIGTERM or SIGINT begins a drain, and a second one ends it early.
    GIVE_UP, which says that the shards will not return, begins a short drain."""

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        self.aborting = asyncio.Event()
        self.has_given_up = False

    def install(self, give_up: Callable[[], None]) -> None:
        """Handle the signals from now on. `give_up` is called by GIVE_UP."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        loop.add_signal_handler(signal.SIGINT, self._stop)
        loop.add_signal_handler(GIVE_UP, self._give_up, give_up)

    async def completes(self, start: Coroutine[Any, Any, None]) -> bool:
        """Run `start` to its end. Cancel it and return False if the drain begins first."""
        task = asyncio.create_task(start)
        draining = asyncio.create_task(self.draining.wait())
        await asyncio.wait((task, draining), return_when=asyncio.FIRST_COMPLETED)
        for one in (task, draining):
            one.cancel()
        await asyncio.wait((task, draining))
        if task.cancelled():
            return False
        task.result()
        return True

    async def wait_until_aborting(self, timeout_s: float) -> None:
        """Wait for the signal that ends the drain early, but not longer than the time limit."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.aborting.wait(), timeout_s)

    def _stop(self) -> None:
        if self.draining.is_set():
            self.aborting.set()
        self.draining.set()

    def _give_up(self, give_up: Callable[[], None]) -> None:
        self.has_given_up = True
        give_up()
        self.draining.set()
