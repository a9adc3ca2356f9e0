"""Assembles and runs the engine process of a router whose APIs run in other processes."""

import asyncio
import contextlib
import gc
import logging
import signal

import uvloop

from tgis.config.processes import RouterConfig
from tgis.process.child import GIVE_UP
from tgis.process.heartbeat import send_heartbeats
from tgis.process.memory.page_collapse import collapse_soon
from tgis.router.configured_metrics import open_metrics
from tgis.router.engine.local_engine import LocalEngine
from tgis.router.metrics.metrics import ENGINE
from tgis.router.metrics.resource_counts import check_balance
from tgis.router.metrics.scrape import keep_published
from tgis.router.remote.engine_server import EngineServer

logger = logging.getLogger(__name__)


def run(config: RouterConfig) -> None:
    """Serve the router workers until SIGTERM or SIGINT. Raises StartupError."""

    async def serve() -> None:
        await _EngineProcess(config).serve()

    uvloop.run(serve())


class _EngineProcess:
    def __init__(self, config: RouterConfig) -> None:
        assert config.engine_path is not None, "an engine process has a socket"
        self._config = config
        self._metrics = open_metrics(config, ENGINE)
        self._is_serving = False
        self._engine = LocalEngine(config, self._metrics, lambda is_ready: self._server.set_ready(is_ready))
        claims = self._engine.claims
        self._server = EngineServer(config.engine_path, claims, self._metrics, config.router_workers)

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        serving = asyncio.create_task(self._serve(), name="engine")
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, serving.cancel)
        loop.add_signal_handler(GIVE_UP, self._engine.give_up)
        heartbeats = send_heartbeats(self._config.heartbeat_fd, lambda: self._is_serving)
        background = [asyncio.create_task(each) for each in (heartbeats, keep_published(self._metrics))]
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            self._server.close()
            await check_balance(self._metrics.resource_counts)
        finally:
            for task in background:
                task.cancel()
            await self._engine.close()
            self._metrics.close()

    async def _serve(self) -> None:
        await self._server.listen()
        # When the engine starts, the shards unload all adapters that no worker has reported.
        await self._server.hear_workers()
        await self._engine.start()
        self._server.start()
        self._is_serving = True
        gc.collect()
        gc.freeze()  # later garbage collections skip the objects that exist now
        collapse_soon()
        logger.info("the engine serves %d router workers", self._config.router_workers)
        await self._engine.run()
