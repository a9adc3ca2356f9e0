"""Starts, watches and kills the shards of one machine together."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol

from tgis.launcher.child_configs import ChildConfigs, Start
from tgis.launcher.nodes.shard_process import ShardProcess, ShardProcesses
from tgis.launcher.plan import LaunchError
from tgis.net.addresses import TcpAddress
from tgis.process.child import End

LOOPBACK = "127.0.0.1"
# Signal that kills a process when it touches shared memory that cannot be allocated.
BUS_ERROR = "SIGBUS"
BUS_ERROR_HINT = "; the shards may lack shared memory: mount at least 1 GB of it at /dev/shm"
SETTLE_S = 1.0  # time to notice which process ended first and caused others to end


class ShardEndedError(LaunchError):
    """Error for a shard that ended before all shards had loaded."""

    def __init__(self, end: End) -> None:
        super().__init__(end.text)
        self.end = end


class Node(Protocol):
    num_losses: int
    """Number of times the node has disconnected."""

    @property
    def addresses(self) -> Sequence[TcpAddress]:
        """TCP addresses of the node's shards, known once the node has connected."""

    async def wait_until_connected(self) -> None: ...

    async def start(self, start: Start, listener: int | None) -> None:
        """Start the shards and wait until all have loaded. Raises ShardEndedError if one ends before.

        `listener` is the descriptor of the rendezvous's socket."""

    async def wait(self) -> End:
        """Wait until one of the node's shards ends, and return its end."""

    async def kill(self) -> None: ...


class LocalNode:
    num_losses = 0

    def __init__(self, configs: ChildConfigs, processes: ShardProcesses) -> None:
        self._configs = configs
        self._processes = processes
        self._shards: list[ShardProcess] = []
        self.host = LOOPBACK

    @property
    def addresses(self) -> list[TcpAddress]:
        return self._configs.addresses(self.host)

    async def wait_until_connected(self) -> None:
        pass

    async def start(self, start: Start, listener: int | None = None) -> None:
        await self.kill()
        try:
            await self._processes.start()
        except OSError as error:  # the system has no process or descriptor left
            raise ShardEndedError(End(f"the shards cannot be started: {error.strerror}")) from error
        self._shards = self._processes.take()
        for index, shard in enumerate(self._shards):
            shard.load(self._configs.shard(index, start, self.host, listener))
        loaded = run_all(shard.wait_until_loaded() for shard in self._shards)
        await run_unless_ended(loaded, self.wait())

    async def wait(self) -> End:
        end = await first_end(shard.wait() for shard in self._shards)
        is_shared = len(self._shards) > 1 and end.text.endswith(BUS_ERROR)
        return End(end.text + BUS_ERROR_HINT) if is_shared else end

    async def kill(self) -> None:
        await asyncio.gather(*(shard.kill() for shard in self._shards))


async def first_end(endings: Iterable[Coroutine[Any, Any, End]]) -> End:
    """Return the first end, unless it is a refusal and another process is killed within SETTLE_S.

    A rank that loses a peer reports that and exits, sometimes before the launcher notices the peer's end."""
    waits = [asyncio.create_task(ending) for ending in endings]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        first = done.pop().result()
        if first.is_refusal and len(waits) > 1:
            await asyncio.wait(waits, timeout=SETTLE_S)
        ends = [first, *(wait.result() for wait in waits if wait.done())]
        return next((end for end in ends if not end.is_refusal), first)
    finally:
        for wait in waits:
            wait.cancel()


async def run_all(coroutines: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Run the coroutines until all are done. If one fails, cancel the others and raise its error."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_unless_ended(loading: Coroutine[Any, Any, object], ending: Coroutine[Any, Any, End]) -> None:
    """Wait for `loading`. Raises ShardEndedError if `ending` is done first."""
    loaded = asyncio.create_task(loading)
    end = asyncio.create_task(ending)
    try:
        await asyncio.wait((loaded, end), return_when=asyncio.FIRST_COMPLETED)
        if end.done():
            raise ShardEndedError(end.result())
        loaded.result()
    finally:
        loaded.cancel()
        end.cancel()
