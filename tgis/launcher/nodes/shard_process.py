"""Starts the processes of this node's shards. They import their libraries while the launcher reads the
model."""

import asyncio
import contextlib
import socket
from collections.abc import Iterable
from dataclasses import asdict

from tgis.config.processes import LauncherConfig, ShardConfig
from tgis.launcher.child_configs import line_fields, uses_tcp
from tgis.process.child import Child, End
from tgis.process.handover import send_options
from tgis.process.output_lines import LineForm

# Number of spins of an idle OpenMP thread before it sleeps, about 0.4 ms on an Intel Xeon. By default it
# spins for milliseconds and takes a core from the router, the clients and the other threads of its step:
# next to one busy process, a step then takes ten times as long. With fewer, threads sleep between the
# kernels of a prompt, and each wake-up costs time: with 2,000 spins, a prompt of 520 tokens takes 215 to
# 330 instead of 160 ms (135m).
SHARD_ENV = {"GOMP_SPINCOUNT": "10000"}
# Shards of one machine communicate over its loopback interface only, and so must NCCL.
LOCAL_ENV = {"NCCL_SOCKET_IFNAME": "lo"}


class ShardProcess:
    """Process of one shard. It imports its libraries, waits for its options, and then loads the model."""

    def __init__(self, config: LauncherConfig, rank: int) -> None:
        self._options, self._their_options = socket.socketpair()
        fd = self._their_options.fileno()
        command = ["serve", "--rank", str(rank), "--device", config.device, "--log-level", config.log_level]
        command += [*(["--json-output"] if config.json_output else []), "--options-fd", str(fd)]
        env = SHARD_ENV if uses_tcp(config) else SHARD_ENV | LOCAL_ENV
        self._child = Child(
            f"shard {rank}",
            command,
            LineForm(f"Shard {rank}: ", line_fields(config, "shard", {"rank": rank})),
            default_env=env,
            has_heartbeat=True,
            fds=[fd],
        )

    async def start(self) -> None:
        with self._their_options:
            await self._child.start()

    def load(self, config: ShardConfig) -> None:
        """Send the options, with which the shard loads its model. A process that has ended gets none."""
        fds = [] if config.rendezvous_fd is None else [config.rendezvous_fd]
        with self._options, contextlib.suppress(OSError):
            send_options(self._options, asdict(config), fds)

    async def wait_until_loaded(self) -> None:
        await self._child.loaded.wait()

    async def wait(self) -> End:
        return await self._child.wait()

    async def kill(self) -> None:
        self._options.close()
        self._their_options.close()
        await self._child.kill()


class ShardProcesses:
    """Processes of this node's shards that wait for their options."""

    def __init__(self, config: LauncherConfig, num_shards: int) -> None:
        self._config = config
        first = config.node_rank * num_shards
        self._ranks = range(first, first + num_shards)
        self._waiting: list[ShardProcess] = []

    async def start(self) -> None:
        """Start the processes, unless they already wait."""
        if self._waiting:
            return
        shards = [ShardProcess(self._config, rank) for rank in self._ranks]
        try:
            await asyncio.gather(*(shard.start() for shard in shards))
        except BaseException:  # the next start must not use a process that was never started
            await _kill_all(shards)
            raise
        self._waiting = shards

    def take(self) -> list[ShardProcess]:
        """Return the waiting processes, in the order of their ranks; the caller kills them."""
        taken = self._waiting
        self._waiting = []
        return taken

    async def kill(self) -> None:
        await _kill_all(self.take())


async def _kill_all(shards: Iterable[ShardProcess]) -> None:
    await asyncio.gather(*(shard.kill() for shard in shards))
