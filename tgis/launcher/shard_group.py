"""Manages the shards of all nodes as one group: they start together, and if one ends, all are restarted."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tgis.launcher.child_configs import Start
from tgis.launcher.nodes.local_node import SETTLE_S, Node, ShardEndedError, first_end, run_all
from tgis.launcher.plan import LaunchError
from tgis.net.addresses import TcpAddress
from tgis.net.ports import listen

logger = logging.getLogger(__name__)

CRASH_WINDOW_S = 300.0
MAX_CRASHES = 6  # of the group within the window; a request that kills shards causes three
MAX_FIRST_CRASHES = 3  # before the group has served for the first time, without a time window
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 4.0


Rendezvous = Callable[[int], AbstractContextManager[tuple[str, int | None]]]
"""Function that opens the rendezvous of the start with this epoch: a file or HOST:PORT, and the descriptor of
the listening socket, if there is one."""


@contextmanager
def file_rendezvous(directory: Path, epoch: int) -> Iterator[tuple[str, None]]:
    """Yield the path of a rendezvous file for ranks on one machine."""
    yield str(directory / f"rendezvous-{epoch}"), None


@contextmanager
def port_rendezvous(host: str, epoch: int) -> Iterator[tuple[str, int]]:
    """Open a new rendezvous port, unknown to ranks left over from an earlier start. Raises PortError."""
    with listen(host, 0) as listener:
        yield str(TcpAddress(host, listener.getsockname()[1])), listener.fileno()


def add_crash(crashes: Sequence[float]) -> list[float]:
    """Return the times of the crashes within the window, plus one crash now."""
    now = time.monotonic()
    return [*(at for at in crashes if now - at < CRASH_WINDOW_S), now]


def backoff_s(num_crashes: int) -> float:
    """Return the delay before the next start: none after the first crash, then doubling up to a maximum."""
    return min(FIRST_BACKOFF_S * 2 ** (num_crashes - 2), MAX_BACKOFF_S) if num_crashes > 1 else 0.0


class ShardGroup:
    def __init__(
        self,
        nodes: Sequence[Node],
        rendezvous: Rendezvous,
        addresses: Path | None,
        startup_timeout: float | None = None,
    ) -> None:
        """`addresses` is the file for the shards' TCP addresses; None: the shards use Unix sockets."""
        self._nodes = nodes
        self._rendezvous = rendezvous
        self._addresses = addresses
        self._startup_timeout = startup_timeout
        self._epoch = 0
        self.is_serving = self.has_served = False

    async def run(self) -> None:
        """Keep the shards running. Raises LaunchError if they crash too often or refuse to start."""
        await self._start_first_in_time()
        crashes: list[float] = []
        while True:
            end = await first_end(node.wait() for node in self._nodes)
            self.is_serving = False
            crashes = add_crash(crashes)
            if len(crashes) > MAX_CRASHES:
                await self.kill()
                raise LaunchError(f"{end.text}; giving up after {MAX_CRASHES} restarts of the shards")
            await self._stop(end.text, len(crashes))
            # If the start fails, the next iteration notices the ended shard and counts the crash.
            with contextlib.suppress(LaunchError):
                await self._start()

    async def kill(self) -> None:
        await asyncio.gather(*(node.kill() for node in self._nodes))

    async def _start_first_in_time(self) -> None:
        """Start the shards for the first time. Raises LaunchError, also after `startup_timeout`."""
        try:
            async with asyncio.timeout(self._startup_timeout) as limit:
                await self._start_first()
        except TimeoutError:
            if not limit.expired():
                raise
            text = f"the model was not loaded within {self._startup_timeout:g} s: see --startup-timeout"
            raise LaunchError(text) from None

    async def _start_first(self) -> None:
        """Start the shards for the first time; nodes may connect and disconnect meanwhile. Raises
        LaunchError."""
        num_crashes = 0
        while True:
            num_losses = self._num_losses
            try:
                return await self._start()
            except ShardEndedError as error:
                end = error.end
            if len(self._nodes) > 1:
                await asyncio.sleep(SETTLE_S)
            if self._num_losses > num_losses:
                await self._stop(end.text)
                continue
            if end.is_refusal and len(self._nodes) > 1:  # the cause may be a killed rank of another node
                end = await first_end(node.wait() for node in self._nodes)
            num_crashes += 1
            if end.is_refusal:
                raise LaunchError(end.text)
            if num_crashes > MAX_FIRST_CRASHES:
                raise LaunchError(f"{end.text}; giving up after {MAX_FIRST_CRASHES} restarts of the shards")
            await self._stop(end.text, num_crashes)

    async def _stop(self, reason: str, num_crashes: int = 1) -> None:
        """Kill all shards, and wait before the next start."""
        logger.error("%s; restarting the shards", reason)
        await self.kill()
        await asyncio.sleep(backoff_s(num_crashes))

    @property
    def _num_losses(self) -> int:
        return sum(node.num_losses for node in self._nodes)

    async def _start(self) -> None:
        """Start the shards on all nodes and wait until all have loaded. Raises LaunchError."""
        for node in self._nodes:
            await node.wait_until_connected()
        self._epoch += 1
        self._write_addresses()
        with self._rendezvous(self._epoch) as (place, listener):
            start = Start(self._epoch, place)
            await run_all(node.start(start, listener) for node in self._nodes)
        self.is_serving = self.has_served = True

    def _write_addresses(self) -> None:
        """Write the shards' addresses to the router's file atomically, because it may be read at any time."""
        if self._addresses is None:  # without TCP, a full disk must not prevent a restart
            return
        new = self._addresses.with_suffix(".new")
        new.write_text(",".join(str(address) for node in self._nodes for address in node.addresses))
        new.replace(self._addresses)
