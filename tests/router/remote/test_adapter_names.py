"""Check adapter names assigned through one of several workers, and after the loss of a worker or the
engine."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.router.engine_process import EngineProcess, Shards, WorkerProcess
from tests.support.router.model_of_contents import Library
from tgis.config.processes import RouterConfig
from tgis.net.framing import frame_body
from tgis.router.errors import NotFoundError, RequestError, UnavailableError
from tgis.router.remote import engine_server
from tgis.router.remote import messages as wire

NUM_WORKERS = 3


@dataclass
class Scene:
    config: RouterConfig
    engine: EngineProcess
    workers: list[WorkerProcess] = field(default_factory=list)

    async def start_worker(self) -> WorkerProcess:
        worker = WorkerProcess(self.config, len(self.workers))
        self.workers.append(worker)
        await worker.start()
        return worker

    async def names(self) -> list[dict[str, str]]:
        """Return the names that each worker knows, without duplicates."""
        async with asyncio.timeout(20):
            known = [dict(await worker.remote.handle.adapter_names()) for worker in self.workers]
        return [each for number, each in enumerate(known) if each not in known[:number]]

    async def restart_engine(self) -> None:
        await self.engine.kill()
        self.engine = EngineProcess(self.config)
        await self.engine.start()


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    config = RouterConfig(
        tokenizer_path="",
        shard_uds_path=str(tmp_path / "shard"),
        engine_path=str(tmp_path / "engine"),
        router_workers=NUM_WORKERS,
        max_sequence_length=200,
    )
    shards = Shards(tmp_path, Library())
    scene = Scene(config, EngineProcess(config))
    await scene.engine.start()
    await asyncio.gather(*(scene.start_worker() for _ in range(NUM_WORKERS)))
    yield scene
    for worker in scene.workers:
        await worker.kill()
    await scene.engine.kill()
    shards.stop()


async def test_a_change_is_known_to_all_workers_when_it_is_answered(scene: Scene) -> None:
    first, second, third = (worker.remote.handle for worker in scene.workers)
    for turn in range(20):
        await first.give_name("sql", f"id-{turn}", False)
        assert await scene.names() == [{"sql": f"id-{turn}"}]
        with pytest.raises(RequestError, match="already been loaded"):
            await second.give_name("sql", "other", False)
        await second.give_name("sql", "other", True)
        assert await scene.names() == [{"sql": "other"}]
        await third.take_name("sql")
        assert await scene.names() == [{}]
        with pytest.raises(NotFoundError, match="'sql' cannot be found"):
            await first.take_name("sql")


async def test_of_several_workers_that_give_a_name_one_wins(scene: Scene) -> None:
    handles = [worker.remote.handle for worker in scene.workers]
    calls = [each.give_name("sql", f"id-{number}", False) for number, each in enumerate(handles)]
    errors = await asyncio.gather(*calls, return_exceptions=True)
    [winner] = [number for number, error in enumerate(errors) if error is None]
    assert await scene.names() == [{"sql": f"id-{winner}"}]


async def test_names_outlive_the_worker_that_gave_them(scene: Scene) -> None:
    await scene.workers[0].remote.handle.give_name("sql", "id", False)
    await scene.workers.pop(0).kill()
    await scene.start_worker()
    assert await scene.names() == [{"sql": "id"}]
    await scene.workers[-1].remote.handle.take_name("sql")
    assert await scene.names() == [{}]


async def test_names_outlive_the_engine_process(scene: Scene) -> None:
    first, second, _ = (worker.remote.handle for worker in scene.workers)
    await first.give_name("kept", "id", False)
    await first.give_name("gone", "id", False)
    await second.take_name("gone")
    for _ in range(2):
        await scene.restart_engine()
        assert await scene.names() == [{"kept": "id"}]
    fresh = await scene.start_worker()
    await fresh.remote.handle.take_name("kept")
    assert await scene.names() == [{}]


@pytest.mark.parametrize("is_done", [False, True])
async def test_a_change_in_progress_is_made_once_when_the_engine_is_lost(scene: Scene, is_done: bool) -> None:
    """Check that a worker which does not answer keeps the change pending until the engine is lost."""
    handle, deaf = scene.workers[0].remote.handle, scene.workers[1].remote
    channel = deaf._channel
    assert channel is not None
    send, channel.send = channel.send, lambda message: None  # type: ignore[method-assign]
    giving = asyncio.create_task(handle.give_name("sql", "id", False))
    if is_done:
        while not await deaf.handle.adapter_names():  # noqa: ASYNC110 - nothing reports it
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not giving.done()
    channel.send = send  # type: ignore[method-assign]
    await scene.restart_engine()
    async with asyncio.timeout(20):
        await giving
    assert await scene.names() == [{"sql": "id"}]


async def test_a_worker_that_ends_holds_up_no_change(scene: Scene) -> None:
    reader, writer = await asyncio.open_unix_connection(scene.config.engine_path)
    writer.write(frame_body(wire.encode(wire.Hello(9, []))))
    await reader.readexactly(4)  # it is connected and does not answer
    giving = asyncio.create_task(scene.workers[0].remote.handle.give_name("sql", "id", False))
    await asyncio.sleep(0.1)
    assert not giving.done()
    writer.close()
    async with asyncio.timeout(20):
        await giving


async def test_without_an_engine_names_wait_and_are_then_given_up(scene: Scene) -> None:
    remote = scene.workers[0].remote
    handle, remote._recovery_timeout = remote.handle, 0.1
    await handle.give_name("sql", "id", False)
    await scene.engine.kill()
    with pytest.raises(UnavailableError):
        await handle.take_name("sql")
    assert await handle.adapter_names() == {"sql": "id"}
    await scene.engine.start()
    assert await scene.names() == [{"sql": "id"}]


async def test_a_late_worker_restores_names_only_if_no_other_worker_had_any(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_server, "GREETINGS_S", 0.0)
    for worker in scene.workers:
        await worker.kill()
    scene.workers.clear()
    await scene.restart_engine()
    fresh = await scene.start_worker()
    for number, names in enumerate(({"sql": "id"}, {"sql": "older", "other": "id"})):
        _, writer = await asyncio.open_unix_connection(scene.config.engine_path)
        writer.write(frame_body(wire.encode(wire.Hello(number, [], 7 + number, names))))
        async with asyncio.timeout(20):
            while not await fresh.remote.handle.adapter_names():  # noqa: ASYNC110 - nothing reports it
                await asyncio.sleep(0.01)
        writer.close()
    await fresh.remote.handle.give_name("last", "id", False)
    assert await scene.names() == [{"sql": "id", "last": "id"}]
