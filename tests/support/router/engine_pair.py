"""Opens an engine in front of a fake shard, without a router. Its handle is local or remote. The messages of
a remote handle cross a socket in pieces at random times."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.support.router.fake_shard import FakeShard, ShardServer
from tests.support.router.model_of_contents import Library
from tests.support.router.slow_relay import SlowRelay
from tgis.config.processes import RouterConfig
from tgis.pb import shard_pb2 as pb
from tgis.router.configured_metrics import open_metrics
from tgis.router.engine.handle import EngineHandle
from tgis.router.engine.local_engine import LocalEngine
from tgis.router.events import Event
from tgis.router.metrics.metrics import Metrics
from tgis.router.remote.engine_server import EngineServer
from tgis.router.remote.remote_engine import RemoteEngine

NUM_PLACES = 128


@dataclass
class Scene:
    handle: EngineHandle
    shard: FakeShard
    server: ShardServer
    metrics: Metrics

    def left(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of taken and released resources by kind, where they differ."""
        counts = self.metrics.resource_counts.items()
        return {kind: (each.created, each.released) for kind, each in counts if not each.is_balanced}


async def each_of(lists: AsyncIterator[list[Event]]) -> AsyncIterator[Event]:
    """Yield the events of a sequence one by one."""
    async for events in lists:
        for event in events:
            yield event


@asynccontextmanager
async def open_scene(
    directory: Path,
    is_split: bool,
    info: pb.InfoResponse | None = None,
    library: Library | None = None,
    max_sequence_length: int = 200,
    **options: Any,
) -> AsyncIterator[Scene]:
    """Open an engine. `options` has further options of the router."""
    path, r = str(directory / "shard"), random.Random(0)
    shard = FakeShard(info=info, library=library)
    server = ShardServer(shard, path)
    config = RouterConfig(
        tokenizer_path="",
        shard_uds_path=path,
        max_sequence_length=max_sequence_length,
        max_concurrent_requests=NUM_PLACES,
        **options,
    )

    metrics = open_metrics(config)
    engine = LocalEngine(config, metrics, lambda is_ready: None)
    running: list[asyncio.Task[None]] = []
    try:
        await engine.start()
        running.append(asyncio.create_task(engine.run()))
        if not is_split:
            yield Scene(engine.handle, shard, server, metrics)
            return
        async with open_remote(directory, config, engine, r) as handle:
            yield Scene(handle, shard, server, metrics)
    finally:
        for task in running:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await engine.close()
        server.stop()


@asynccontextmanager
async def open_remote(
    directory: Path, config: RouterConfig, engine: LocalEngine, r: random.Random
) -> AsyncIterator[EngineHandle]:
    """Yield the handle of a worker whose engine has started, across a slow relay."""
    relay = SlowRelay(str(directory / "relay"), str(directory / "engine"), r)
    engine_server = EngineServer(
        str(directory / "engine"), engine.claims, open_metrics(config), num_workers=1
    )
    remote = RemoteEngine(replace(config, engine_path=relay.path), open_metrics(config), lambda _: None)
    try:
        await engine_server.listen()
        engine_server.start()
        await relay.start()
        await remote.start()
        yield remote.handle
    finally:
        await remote.close()
        engine_server.close()
        await relay.stop()
