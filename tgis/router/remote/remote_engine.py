"""Engine in another process, as seen by a router worker: the connection and its recovery. No request is lost
with an engine process: all requests wait for the next process and continue there."""

import asyncio
import logging
from collections.abc import Callable

from tgis.config.processes import RouterConfig
from tgis.net.framed_channel import FramedChannel
from tgis.router.engine.handle import EngineHandle
from tgis.router.errors import Code
from tgis.router.events import Failed
from tgis.router.metrics.gauges import GaugeValues
from tgis.router.metrics.metrics import Metrics
from tgis.router.remote import messages as wire
from tgis.router.remote.gauges import GaugeAsker, report_gauges
from tgis.router.remote.remote_handle import RemoteHandle
from tgis.router.shards.client import LOST

logger = logging.getLogger(__name__)

RETRY_INTERVAL_S = 0.02
ENGINE_LOST = Failed(Code.UNAVAILABLE, LOST)


class RemoteEngine:
    """`EngineHost` whose engine is in another process."""

    def __init__(self, config: RouterConfig, metrics: Metrics, on_ready: Callable[[bool], None]) -> None:
        """Create a host. `on_ready` is called when the engine with its shards becomes ready or is lost."""
        assert config.engine_path is not None, "an engine in another process has a socket"
        self._path = config.engine_path
        self._worker = config.worker
        self._recovery_timeout = config.recovery_timeout
        self._on_ready = on_ready
        self._is_running = self._is_ready = False
        self._handle = RemoteHandle(metrics)
        self.handle: EngineHandle = self._handle
        self._channel: FramedChannel[wire.EngineMessage] | None = None
        self._metrics = metrics
        self._gauges = GaugeAsker()
        self._attached = asyncio.Event()
        self._lost = asyncio.Event()

    @property
    def num_live(self) -> int:
        return self._handle.num_live

    async def start(self) -> None:
        await self._connect()

    async def run(self) -> None:
        self._is_running = True
        self._on_ready(self._is_ready)
        while True:
            await self._lost.wait()
            logger.warning("the engine process is lost; requests to resume: %d", self.num_live)
            await self._reconnect()
            logger.info("the engine process is back; requests resumed: %d", self.num_live)

    async def gauges(self) -> list[GaugeValues]:
        if self._channel is None or not self._attached.is_set():
            return []
        return await self._gauges.ask(self._channel.send)

    def give_up(self) -> None:
        logger.error("the shards will not be restarted; requests ended with an error: %d", self.num_live)
        self._handle.give_up(ENGINE_LOST)

    async def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    async def _connect(self) -> None:
        """Wait, without a time limit, until an engine process is connected and has started."""
        loop = asyncio.get_running_loop()
        while not self._attached.is_set():
            self._lost.clear()
            try:
                _, self._channel = await loop.create_unix_connection(self._make_channel, self._path)
            except OSError:  # there is no engine process at the moment
                await asyncio.sleep(RETRY_INTERVAL_S)
                continue
            self._handle.greet(self._worker, self._channel.send)
            await _first(self._attached, self._lost)

    async def _reconnect(self) -> None:
        try:
            async with asyncio.timeout(self._recovery_timeout):
                await self._connect()
        except TimeoutError:
            if self._attached.is_set():  # it has started since the time ended
                return
            logger.error("the engine process did not come back within %s s", self._recovery_timeout)
            await self.close()  # a process that is still waiting for shards would keep this worker's claims
            self._handle.give_up(ENGINE_LOST)
            await self._connect()

    def _make_channel(self) -> FramedChannel[wire.EngineMessage]:
        return FramedChannel(wire.PEERS, wire.encode, wire.decode_engine_message, self._take, self._lose)

    def _take(self, message: wire.EngineMessage) -> None:
        match message:
            case wire.State():
                self._take_state(message)
            case wire.RequestGauges():
                assert self._channel is not None, "a message comes from a channel"
                self._channel.send(report_gauges(self._metrics, message))
            case wire.OtherGauges():
                self._gauges.take(message)
            case _:
                self._handle.take(message)

    def _take_state(self, message: wire.State) -> None:
        if not self._attached.is_set():
            self._attached.set()
            self._handle.attach(message.info)
        self._set_ready(message.is_ready)

    def _lose(self) -> None:
        self._attached.clear()
        self._handle.detach()
        self._set_ready(False)
        self._lost.set()

    def _set_ready(self, is_ready: bool) -> None:
        is_changed = is_ready != self._is_ready
        self._is_ready = is_ready
        if is_changed and self._is_running:  # before that, the ports are not open
            self._on_ready(is_ready)


async def _first(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
