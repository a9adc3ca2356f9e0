"""Manages node 0's connections to the launchers of the other nodes. A lost node may reconnect."""

import asyncio
import logging
import socket
from collections.abc import Mapping
from typing import Any, NoReturn

from tgis.launcher.child_configs import Start
from tgis.launcher.nodes.local_node import run_unless_ended
from tgis.launcher.nodes.node_channel import MAX_LINE_BYTES, Channel, ChannelLostError, Message
from tgis.launcher.plan import LaunchError
from tgis.net.addresses import AddressError, TcpAddress, parse
from tgis.net.tls import Certificates
from tgis.process.child import End

logger = logging.getLogger(__name__)

HELLO_S = 10.0  # time to send the first message after the TLS handshake
HANDSHAKE_S = 5.0
CLOSE_S = 2.0  # time to read the last messages


class RemoteNodes:
    def __init__(self, num_others: int, common: Mapping[str, Any], certificates: Certificates) -> None:
        """Create the nodes, unconnected. `common` has the options that must be equal on all nodes."""
        self.nodes = [RemoteNode(rank) for rank in range(1, num_others + 1)]
        self._common = common
        self._certificates = certificates
        self._channels: dict[asyncio.Task[None], Channel] = {}

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections of nodes until cancelled."""
        server = await asyncio.start_server(
            self._accept,
            sock=listener,
            ssl=self._certificates.renewing_context(),
            ssl_handshake_timeout=HANDSHAKE_S,
            limit=MAX_LINE_BYTES,
        )
        try:
            await self._certificates.watch()
        finally:
            server.close()  # existing connections stay open

    async def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        tasks = list(self._channels)
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        for channel in self._channels.values():  # of nodes that hang; TLS would wait half a minute for them
            channel.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        task = asyncio.current_task()
        assert task is not None, "callbacks of a server are tasks"
        self._channels[task] = channel
        try:
            await self._identify(channel)
        except ChannelLostError as error:
            logger.debug("connection from %s ended: %s", channel.other_host, error)
        except TimeoutError:
            logger.warning("%s connected but did not send its node_rank", channel.other_host)
        finally:
            del self._channels[task]
            channel.close()

    async def _identify(self, channel: Channel) -> None:
        """Read the first message; refuse or follow the node. Raises ChannelLostError and TimeoutError."""
        async with asyncio.timeout(HELLO_S):
            hello = await channel.receive()
        try:
            rank, addresses = self._read_hello(hello)
        except LaunchError as error:
            logger.warning("refused the launcher at %s: %s", channel.other_host, error)
            channel.send("refused", reason=str(error))
            return
        await self.nodes[rank - 1].follow(channel, addresses)

    def _read_hello(self, hello: Message) -> tuple[int, list[TcpAddress]]:
        """Return the node's rank and shard addresses. Raises LaunchError if the node does not fit this
        group."""
        try:
            rank = int(hello["node_rank"])
            common = dict(hello["common"])
            addresses = [parse(text) for text in hello["addresses"]]
        except (KeyError, TypeError, ValueError, AddressError) as error:
            raise LaunchError("its first message is invalid") from error
        if not 0 < rank <= len(self.nodes):
            raise LaunchError(f"node_rank {rank} is out of range for {len(self.nodes) + 1} nodes")
        for name, value in self._common.items():
            if common.get(name) != value:
                raise LaunchError(f"{name} is {common.get(name)} on node {rank} and {value} on node 0")
        return rank, addresses


class RemoteNode:
    """Node other than node 0, connected or not."""

    def __init__(self, rank: int) -> None:
        self.name = f"node {rank}"
        self.addresses: list[TcpAddress] = []
        self.num_losses = 0
        self._channel: Channel | None = None
        self._is_connected = asyncio.Event()
        self._epoch = 0
        self._has_loaded = asyncio.Event()
        self._end: asyncio.Future[End] | None = None

    async def wait_until_connected(self) -> None:
        if not self._is_connected.is_set():
            logger.info("waiting for %s to connect", self.name)
        await self._is_connected.wait()

    async def start(self, start: Start, listener: int | None) -> None:
        self._epoch = start.epoch
        self._has_loaded = asyncio.Event()
        self._end = asyncio.get_running_loop().create_future()
        if self._channel is None:
            self._set_end(End(f"{self.name} is lost"))
        else:
            self._channel.send("start", epoch=start.epoch, rendezvous=start.rendezvous)
        await run_unless_ended(self._has_loaded.wait(), self.wait())

    async def wait(self) -> End:
        assert self._end is not None, "wait comes after start"
        return await asyncio.shield(self._end)

    async def kill(self) -> None:
        if self._channel is not None:
            self._channel.send("kill")

    async def follow(self, channel: Channel, addresses: list[TcpAddress]) -> NoReturn:
        """Receive this node's messages until the channel is lost or replaced. Raises ChannelLostError."""
        if self._channel is not None:
            self._disconnect("it reconnected")
        self._channel = channel
        self.addresses = addresses
        self._is_connected.set()
        logger.info("%s connected from %s", self.name, channel.other_host)
        try:
            while True:
                self._handle(await channel.receive())
        except ChannelLostError as error:
            if self._channel is channel:
                self._disconnect(str(error))
            raise

    def _disconnect(self, reason: str) -> None:
        assert self._channel is not None, "only a connected node can be lost"
        logger.warning("%s is lost: %s", self.name, reason)
        self._channel.close()
        self._channel = None
        self.num_losses += 1
        self._is_connected.clear()
        self._set_end(End(f"{self.name} is lost: {reason}"))

    def _handle(self, message: Message) -> None:
        if message.get("epoch") != self._epoch:
            return  # the message is about shards that were killed in the meantime
        if message["kind"] == "loaded":
            self._has_loaded.set()
        elif message["kind"] == "ended":
            text = f"{self.name}: {message.get('reason')}"
            self._set_end(End(text, bool(message.get("is_refusal"))))

    def _set_end(self, end: End) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_result(end)
