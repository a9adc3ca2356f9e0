"""An engine in front of a fake shard, without a router: its own handle, and both halves of a split handle,
whose messages cross as bytes and at random times."""

import asyncio
import pickle
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.router.fake_shard import FakeShard, ShardServer
from tests.support.router.model_of_contents import Library
from tests.support.router.split_engine import SplitServer
from tests.support.router.split_handle import SplitHandle
from tgis.config.processes import RouterConfig
from tgis.pb import shard_pb2 as pb
from tgis.router.engine.handle import EngineHandle
from tgis.router.events import Event
from tgis.router.metrics.metrics import Metrics

NUM_PLACES = 128


@dataclass
class Scene:
    handle: EngineHandle
    shard: FakeShard
    server: ShardServer
    metrics: Metrics

    def left(self) -> dict[str, tuple[int, int]]:
        """What was taken and not given back."""
        counts = self.metrics.resource_counts.items()
        return {kind: (each.created, each.released) for kind, each in counts if not each.is_balanced}


async def each_of(lists: AsyncIterator[list[Event]]) -> AsyncIterator[Event]:
    """Yield the events of a sequence one by one."""
    async for events in lists:
        for event in events:
            yield event


class Wire:
    """Messages in one direction, each a while after the one before."""

    def __init__(self, r: random.Random, take: Any) -> None:
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()
        self._random, self._take = r, take
        self.task = asyncio.create_task(self._carry())

    def send(self, *message: Any) -> None:
        self._messages.put_nowait(pickle.dumps(message))

    async def _carry(self) -> None:
        while True:
            message = pickle.loads(await self._messages.get())  # noqa: S301
            for _ in range(self._random.choice([0, 0, 1, 3])):
                await asyncio.sleep(self._random.choice([0, 0, 0, 0.004]))  # a step takes 0.001
            await self._take(*message)


@asynccontextmanager
async def open_scene(
    directory: Path,
    is_split: bool,
    info: pb.InfoResponse | None = None,
    library: Library | None = None,
    max_sequence_length: int = 200,
    **options: Any,
) -> AsyncIterator[Scene]:
    """`options` are further ones of the router."""
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

    async def at_engine(kind: str, *values: Any) -> None:
        await getattr(engine, kind)(*values)

    async def at_door(kind: str, number: int, value: Any) -> None:
        if kind in ("event", "answer"):
            door.take(kind, number, value)

    to_engine, to_door = Wire(r, at_engine), Wire(r, at_door)
    door, engine = SplitHandle(to_engine.send), SplitServer(config, to_door.send)
    try:
        await engine.engine.start()
        await engine.run()
        door.engine_info = engine.engine.handle.info()
        yield Scene(door if is_split else engine.engine.handle, shard, server, engine.metrics)
    finally:
        for wire in (to_engine, to_door):
            wire.task.cancel()
        with suppress(asyncio.CancelledError):
            await engine.close()
        server.stop()
