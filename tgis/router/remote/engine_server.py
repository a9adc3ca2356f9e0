"""Unix socket of the engine process, to which router workers connect."""

import asyncio
import contextlib
import logging
import os
import socket
from typing import Any

from tgis.net.framed_channel import FramedChannel
from tgis.router.engine.claims import Claims
from tgis.router.engine.handle import CallName
from tgis.router.metrics.metrics import Metrics
from tgis.router.remote import messages as wire
from tgis.router.remote.gauges import GaugeGatherer
from tgis.router.remote.names import SharedNames
from tgis.router.remote.worker_session import WorkerSession

logger = logging.getLogger(__name__)

# Time for the workers of an earlier engine process to report the adapters that they use, before the shards
# unload all others. Workers try to reconnect every RETRY_INTERVAL_S.
GREETINGS_S = 2.0


class EngineServer:
    def __init__(self, path: str, claims: Claims, metrics: Metrics, num_workers: int) -> None:
        self._gauges = GaugeGatherer(metrics)
        self.names = SharedNames(claims.names)
        self._path = path
        self._claims = claims
        self._num_workers = num_workers
        self._connections: set[_WorkerConnection] = set()
        self._greeted = asyncio.Event()
        self._is_started = self._is_ready = False
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Start to accept workers."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: _WorkerConnection(self).channel, sock=_bind(self._path)
        )

    async def hear_workers(self) -> None:
        """Wait, at most GREETINGS_S, until all workers have reported their claims."""
        with contextlib.suppress(TimeoutError):
            # `wait_for` may swallow the cancellation that ends the process.
            async with asyncio.timeout(GREETINGS_S):
                await self._greeted.wait()

    def start(self) -> None:
        """Start to answer the workers, because the engine has started."""
        self._is_started = True
        for connection in list(self._connections):
            connection.start()

    def set_ready(self, is_ready: bool) -> None:
        """Report to the workers whether the shards are connected."""
        self._is_ready = is_ready
        if self._is_started:
            for connection in self._connections:
                connection.send_state()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.channel.close()
            connection.end()

    @property
    def claims(self) -> Claims:
        return self._claims

    @property
    def is_started(self) -> bool:
        return self._is_started

    @property
    def is_closed(self) -> bool:
        return self._server is None or not self._server.is_serving()

    def state(self) -> wire.State:
        return wire.State(self._claims.info(), self._is_ready)

    def gather_gauges(self, message: wire.AskGauges, asker: "_WorkerConnection") -> None:
        """Answer a worker with the gauges of all other processes."""
        others = [each.channel.send for each in self._connections if each is not asker]
        self._gauges.gather(message, asker.channel.send, others)

    def abort(self, message: wire.AskAbort, asker: "_WorkerConnection") -> None:
        """Let all other workers abort calls, and answer whether they have any."""
        are_aborted = [each.abort(message.name) for each in self._connections if each is not asker]
        asker.channel.send(wire.AbortAsked(message.claim_id, any(are_aborted)))

    def take_gauges(self, message: wire.OwnGauges) -> None:
        self._gauges.take(message)

    def add(self, connection: "_WorkerConnection") -> None:
        self._connections.add(connection)
        if len(self._connections) >= self._num_workers:
            self._greeted.set()

    def remove(self, connection: "_WorkerConnection") -> None:
        self._connections.discard(connection)
        self.names.remove(connection.channel.send)


class _WorkerConnection:
    """Connection of one worker. Messages after the first are queued until the engine has started."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server
        self.channel: FramedChannel[wire.WorkerMessage] = FramedChannel(
            wire.PEERS, wire.encode, wire.decode_worker_message, self._take, self.end
        )
        self._session: WorkerSession | None = None
        self._waiting: list[Any] = []
        self._worker = -1

    def start(self) -> None:
        assert self._session is not None, "a connection is added with its first message"
        self._server.names.add(self.channel.send)
        self.send_state()
        waiting = self._waiting
        self._waiting = []
        for message in waiting:
            self._take(message)

    def send_state(self) -> None:
        self.channel.send(self._server.state())

    def abort(self, name: CallName) -> bool:
        return self._session is not None and self._session.abort(name)

    def end(self) -> None:
        """Release the worker's claims, because its connection has ended."""
        if self._session is not None:
            logger.info("router worker %d has disconnected", self._worker)
            self._session.close()
            self._session = None
        self._server.remove(self)

    def _take(self, message: wire.WorkerMessage) -> None:
        match message:
            case wire.Hello():
                self._greet(message)
            case wire.AskGauges():
                self._server.gather_gauges(message, self)
            case wire.AskAbort() if self._server.is_started:
                self._server.abort(message, self)
            case wire.OwnGauges():
                self._server.take_gauges(message)
            case wire.NamesKnown():
                self._server.names.note(self.channel.send, message.version)
            case wire.ChangeName() if self._server.is_started:
                self._server.names.change(message, self.channel.send)
            case _ if self._server.is_started:
                assert self._session is not None, "the first message of a worker is its greeting"
                self._session.take(message)
            case _:
                self._waiting.append(message)

    def _greet(self, message: wire.Hello) -> None:
        if self._server.is_closed:  # it was closed after this worker connected
            self.channel.close()
            return
        self._worker = message.worker
        self._session = WorkerSession(self._server.claims, self.channel.send, self.channel.send_now)
        logger.info("router worker %d has connected; active calls: %d", self._worker, len(message.claims))
        self._session.greet(message)
        self._server.names.restore(message.names_version, message.names)
        self._server.add(self)
        if self._server.is_started:
            self.start()


def _bind(path: str) -> socket.socket:
    """Return a Unix socket to which only this user may connect. Its mode is set before it listens."""
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.bind(path)
        os.chmod(path, 0o600)
    except BaseException:
        bound.close()
        raise
    return bound
