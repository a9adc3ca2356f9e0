"""Tests aborts of calls that another router worker serves, with two workers and an engine in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from tests.support.router.fake_shard import FakeShard, ShardServer
from tgis.config.processes import RouterConfig
from tgis.router.configured_metrics import open_metrics
from tgis.router.engine.handle import CallName, EngineHandle
from tgis.router.engine.local_engine import LocalEngine
from tgis.router.remote.engine_server import EngineServer
from tgis.router.remote.remote_engine import RemoteEngine

NAME, OTHER = CallName("acme", "1"), CallName("zeta", "1")


class Workers:
    """Handles of two workers, and an engine process that can be replaced."""

    def __init__(self, directory: Path, config: RouterConfig, engine: LocalEngine) -> None:
        self._config, self._engine = replace(config, engine_path=str(directory / "engine")), engine
        self._remotes = [
            RemoteEngine(replace(self._config, worker=worker), open_metrics(config), lambda _: None)
            for worker in range(2)
        ]
        self._server: EngineServer | None = None
        self._running: list[asyncio.Task[None]] = []

    @property
    def handles(self) -> list[EngineHandle]:
        return [remote.handle for remote in self._remotes]

    async def start(self) -> None:
        await self._listen()
        assert self._server is not None
        self._server.start()
        for remote in self._remotes:
            await remote.start()
            self._running.append(asyncio.create_task(remote.run()))

    async def replace_engine(self) -> None:
        """End the engine process, and start another one."""
        assert self._server is not None
        self._server.close()
        await self._listen()
        await self._server.hear_workers()
        self._server.start()

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for remote in self._remotes:
            await remote.close()
        if self._server is not None:
            self._server.close()

    async def _listen(self) -> None:
        assert self._config.engine_path is not None
        self._server = EngineServer(
            self._config.engine_path, self._engine.claims, open_metrics(self._config), num_workers=2
        )
        await self._server.listen()


@asynccontextmanager
async def two_workers(directory: Path) -> AsyncIterator[Workers]:
    path = str(directory / "shard")
    server = ShardServer(FakeShard(), path)
    config = RouterConfig(tokenizer_path="", shard_uds_path=path, max_sequence_length=200, router_workers=2)
    engine = LocalEngine(config, open_metrics(config), lambda _: None)
    await engine.start()
    workers = Workers(directory, config, engine)
    running = asyncio.create_task(engine.run())
    try:
        await workers.start()
        yield workers
    finally:
        await workers.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await engine.close()
        server.stop()


async def test_a_call_is_aborted_in_the_worker_that_serves_it(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as workers:
        first, second = workers.handles
        aborted: asyncio.Queue[CallName] = asyncio.Queue()
        first.watch_aborts(aborted.put_nowait)
        claim_id = await first.acquire(1, name=NAME)
        await first.acquire(1)
        assert not await second.abort_elsewhere(OTHER), "the call belongs to another tenant"
        assert not await first.abort_elsewhere(NAME), "the worker itself does not ask for its own calls"
        assert await second.abort_elsewhere(NAME)
        assert await asyncio.wait_for(aborted.get(), 60) == NAME
        await workers.replace_engine()
        assert await second.abort_elsewhere(NAME), "workers report their calls to the next engine process"
        assert await asyncio.wait_for(aborted.get(), 60) == NAME
        first.release(claim_id)
        first.release(await first.acquire(1))  # its answer comes after the release
        assert not await second.abort_elsewhere(NAME)
        assert aborted.empty()
