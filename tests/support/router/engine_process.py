"""Engine and workers that tests can kill. A killed engine loses its state, as if its process were killed."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tests.support.router.fake_shard import FakeShard, ShardServer
from tests.support.router.model_of_contents import Library
from tgis.config.processes import RouterConfig
from tgis.router.configured_metrics import open_metrics
from tgis.router.engine.local_engine import LocalEngine
from tgis.router.metrics.metrics import Metrics
from tgis.router.remote.engine_server import EngineServer
from tgis.router.remote.remote_engine import RemoteEngine


class EngineProcess:
    """Engine at `engine` in a directory whose shard is at `shard`."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.metrics: Metrics | None = None
        self._engine: LocalEngine | None = None
        self._server: EngineServer | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.metrics = open_metrics(self.config)
        engine = self._engine = LocalEngine(self.config, self.metrics, lambda ready: server.set_ready(ready))
        assert self.config.engine_path is not None
        server = self._server = EngineServer(
            self.config.engine_path, engine.claims, self.metrics, self.config.router_workers
        )
        await server.listen()
        self._task = asyncio.create_task(self._run(engine, server))

    async def _run(self, engine: LocalEngine, server: EngineServer) -> None:
        await server.hear_workers()
        await engine.start()
        server.start()
        await engine.run()

    async def kill(self) -> None:
        """End it immediately. Its sockets close, and its state is lost."""
        assert self._task is not None
        assert self._server is not None
        assert self._engine is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._server.close()
        await self._engine.close()

    def left(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of this engine's taken and released resources by kind, where they differ."""
        assert self.metrics is not None
        counts = self.metrics.resource_counts.items()
        return {kind: (each.created, each.released) for kind, each in counts if not each.is_balanced}


class WorkerProcess:
    """Router worker's half of the handle, without its APIs."""

    def __init__(self, config: RouterConfig, number: int) -> None:
        config = replace(config, worker=number)
        self.remote = RemoteEngine(config, open_metrics(config), lambda is_ready: None)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.remote.start()
        self._task = asyncio.create_task(self.remote.run())

    async def kill(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self.remote.close()


class Shards:
    """Fake shard that can be lost with its state and started again."""

    def __init__(self, directory: Path, library: Library) -> None:
        self._path, self._library, self.epoch = str(directory / "shard"), library, 0
        self.start()

    def start(self) -> None:
        self.epoch += 1
        self.shard = FakeShard(epoch=self.epoch, library=self._library)
        self._server = ShardServer(self.shard, self._path)

    def stop(self) -> None:
        self._server.stop()
