"""Implements the launcher of nodes other than node 0: it starts and kills shards as node 0 orders."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

from tgis.config.processes import LauncherConfig
from tgis.launcher.child_configs import ChildConfigs, Start, line_fields
from tgis.launcher.nodes.local_node import LocalNode, ShardEndedError
from tgis.launcher.nodes.node_channel import MAX_LINE_BYTES, Channel, ChannelLostError
from tgis.launcher.nodes.shard_process import ShardProcesses
from tgis.launcher.plan import LaunchError, Plan
from tgis.launcher.run_files import RunFiles
from tgis.launcher.shard_health import serve_health
from tgis.net.tls import link_certificates, mutual_client_context

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
RETRY_S = 1.0


class Follower:
    def __init__(self, config: LauncherConfig, plan: Plan, shards: ShardProcesses) -> None:
        """Read the certificates and create the run directory. Raises RunDirectoryError and
        CertificateError."""
        self._config = config
        self._certificates = link_certificates(config, mutual_client_context)
        self._files = RunFiles(plan, config.shard_uds_path, line_fields(config, "tokenizer"))
        self._configs = ChildConfigs(config, plan, self._files)
        self._local = LocalNode(self._configs, shards)
        self._running: asyncio.Task[None] | None = None
        self._last_warning = ""
        self._idle = asyncio.Event()
        self._idle.set()  # no shard serves yet

    async def run(self) -> None:
        """Follow node 0 until cancelled. Raises PortError, and LaunchError if node 0 refuses this node."""
        watching = asyncio.create_task(self._certificates.watch(), name="certificates")
        try:
            async with serve_health(self._config, lambda: not self._idle.is_set()):
                await self._files.prepare()
                while True:
                    try:
                        async with self._connect() as channel:
                            await self._obey(channel)
                    except (ChannelLostError, OSError, TimeoutError) as error:
                        self._warn_once(str(error) or type(error).__name__)
                    await asyncio.sleep(RETRY_S)
        finally:
            watching.cancel()

    async def drain(self, main: "asyncio.Task[None]", abort: "asyncio.Task[bool]") -> None:
        """Keep the shards running until node 0 no longer needs them, or until `shutdown_timeout` has passed.

        When the whole group stops, node 0's router drains during this time. A second signal, which ends
        `abort`, ends the wait at once."""
        idle = asyncio.create_task(self._idle.wait())
        timeout_s = self._config.shutdown_timeout
        await asyncio.wait((main, idle, abort), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()

    async def close(self) -> None:
        await self._local.kill()
        self._files.remove()

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Channel]:
        """Connect to node 0, and on exit disconnect and kill the shards. Raises OSError and TimeoutError."""
        host = self._config.master_addr
        self._certificates.refresh()
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(
                host,
                self._config.master_port,
                ssl=self._certificates.context,
                server_hostname=self._config.link_server_name or host,
                limit=MAX_LINE_BYTES,
            )
        channel = Channel(reader, writer)
        self._local.host = channel.own_host
        try:
            yield channel
        finally:
            channel.close()
            await self._kill()

    async def _obey(self, channel: Channel) -> NoReturn:
        """Introduce this node and follow node 0's orders. Raises ChannelLostError, and LaunchError if
        refused."""
        addresses = [str(address) for address in self._local.addresses]
        common = self._configs.common
        channel.send("hello", node_rank=self._config.node_rank, common=common, addresses=addresses)
        while True:
            message = await channel.receive()
            if message["kind"] == "refused":
                raise LaunchError(f"node 0 refused this node: {message.get('reason')}")
            await self._kill()
            if message["kind"] == "start":
                self._last_warning = ""
                start = Start(int(message["epoch"]), str(message["rendezvous"]))
                logger.info("starting this node's shards: start %d of the group", start.epoch)
                self._running = asyncio.create_task(self._run(start, channel))

    async def _run(self, start: Start, channel: Channel) -> None:
        """Start this node's shards, wait until one ends, and report both to node 0."""
        try:
            await self._local.start(start)
            self._idle.clear()
            channel.send("loaded", epoch=start.epoch)
            end = await self._local.wait()
        except ShardEndedError as error:
            end = error.end
        self._idle.set()
        logger.error("%s", end.text)
        channel.send("ended", epoch=start.epoch, reason=end.text, is_refusal=end.is_refusal)

    async def _kill(self) -> None:
        running = self._running
        self._running = None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await self._local.kill()
        self._idle.set()

    def _warn_once(self, reason: str) -> None:
        """Log why there is no connection, unless the last warning gave the same reason."""
        if reason != self._last_warning:
            logger.warning("no connection to node 0 at %s: %s", self._config.master_addr, reason)
            self._last_warning = reason
