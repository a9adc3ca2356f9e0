"""Check connections to an engine process from a worker's side of the socket."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tgis.config.processes import RouterConfig
from tgis.net import framed_channel
from tgis.net.framing import frame_body
from tgis.router.configured_metrics import open_metrics
from tgis.router.engine.local_engine import LocalEngine
from tgis.router.metrics.gauges import GaugeValues
from tgis.router.remote import gauges
from tgis.router.remote import messages as wire
from tgis.router.remote.engine_server import EngineServer

HELLO = wire.Hello(0, [])


@dataclass
class Socket:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, message: object) -> None:
        self.writer.write(frame_body(wire.encode(message)))

    async def receive(self) -> object:
        """Return the next message of the engine."""
        async with asyncio.timeout(20):
            length = int.from_bytes(await self.reader.readexactly(4), "little")
            return wire.decode_engine_message(await self.reader.readexactly(length))

    async def is_closed(self) -> bool:
        """Wait for the end of the connection, and return whether no data came."""
        async with asyncio.timeout(20):
            try:
                return await self.reader.read(1) == b""
            except ConnectionResetError:
                return True

    async def is_cut(self) -> bool:
        """Read to the end, and return whether the data ends inside a message."""
        async with asyncio.timeout(20):
            try:
                while True:
                    await self.receive()
            except (asyncio.IncompleteReadError, ConnectionResetError):
                return True


@dataclass
class Scene:
    path: str
    server: EngineServer
    sockets: list[Socket] = field(default_factory=list)

    async def connect(self) -> Socket:
        self.sockets.append(Socket(*await asyncio.open_unix_connection(self.path)))
        return self.sockets[-1]


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    path = str(tmp_path / "engine")
    config = RouterConfig(tokenizer_path="", shard_uds_path=str(tmp_path / "shard"))
    metrics = open_metrics(config)
    engine = LocalEngine(config, metrics, lambda is_ready: None)
    server = EngineServer(path, engine.claims, metrics, num_workers=1)
    await server.listen()
    scene = Scene(path, server)
    yield scene
    for each in scene.sockets:
        each.writer.close()
    server.close()


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_worker_that_greets_a_closed_server_is_cut(scene: Scene, num_turns: int) -> None:
    """Check that a worker sees the server close, in every state of its connection."""
    worker = await scene.connect()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    scene.server.close()
    worker.send(HELLO)
    worker.send(wire.Release(wire.ClaimId(0)))
    assert await worker.is_closed()


async def test_a_message_that_cannot_be_read_ends_its_connection_alone(scene: Scene) -> None:
    broken, sound = await scene.connect(), await scene.connect()
    for each in broken, sound:
        each.send(HELLO)
    broken.writer.write(frame_body(b"\xc1"))
    assert await broken.is_closed()
    assert not sound.reader.at_eof()


async def test_a_worker_that_reads_nothing_is_cut(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framed_channel, "MAX_UNSENT_BYTES", 1 << 20)
    monkeypatch.setattr(framed_channel, "UNREAD_LIMIT_S", 0.2)
    hung, slow = await scene.connect(), await scene.connect()
    for each in hung, slow:
        each.send(HELLO)
    while len(scene.server._connections) < 2:  # noqa: ASYNC110 - the server tells nobody
        await asyncio.sleep(0)
    message = wire.Refused(wire.ClaimId(0), "", "x" * (1 << 16))
    for connection in scene.server._connections:
        for _ in range(640):
            connection.channel.send(message)
    async with asyncio.timeout(20):
        while len(scene.server._connections) == 2:
            for _ in range(2):
                assert await slow.receive() == message
            await asyncio.sleep(0.01)
    assert await hung.is_cut()
    for _ in range(8):
        assert await slow.receive() == message


async def test_a_worker_is_not_cut_because_the_engine_stood_still(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framed_channel, "MAX_UNSENT_BYTES", 1 << 20)
    monkeypatch.setattr(framed_channel, "UNREAD_LIMIT_S", 0.5)
    worker = await scene.connect()
    worker.send(HELLO)
    while not scene.server._connections:  # noqa: ASYNC110 - the server tells nobody
        await asyncio.sleep(0)
    [connection] = scene.server._connections
    message = wire.Refused(wire.ClaimId(0), "", "x" * (1 << 16))
    for _ in range(160):
        connection.channel.send(message)
    await asyncio.sleep(0)
    time.sleep(0.6)  # noqa: ASYNC251 - the whole process stands still
    for _ in range(160):
        assert await worker.receive() == message
    assert scene.server._connections


@pytest.mark.parametrize("answering", [[], [1], [1, 2], [2, 3, 1]])
async def test_gauges_of_the_workers_that_answer(scene: Scene, answering: list[int]) -> None:
    """Check that a worker gets the values of the engine and of the other workers, but not its own.

    Only the values of a hanging or lost worker are missing."""
    asker, *others = [await scene.connect() for _ in range(4)]
    for each in asker, *others:
        each.send(HELLO)
    while len(scene.server._connections) < 4:  # noqa: ASYNC110 - the server tells nobody
        await asyncio.sleep(0)
    asker.send(wire.AskGauges(7))
    questions = [await each.receive() for each in others]
    if not answering:
        others[0].writer.close()
    for number in answering:
        question = questions[number - 1]
        assert isinstance(question, wire.RequestGauges)
        values = GaugeValues({"tgi_tasks": [((), float(number))]})
        others[number - 1].send(wire.OwnGauges(question.number, values))
    answer = await asker.receive()
    assert isinstance(answer, wire.OtherGauges)
    assert answer.number == 7
    engine, *workers = answer.values
    assert "tgi_permits_limit" in engine.by_name
    assert [values.by_name["tgi_tasks"][0][1] for values in workers] == answering


async def test_gauges_without_other_workers(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the engine waits for no worker."""
    monkeypatch.setattr(gauges, "ANSWER_S", 3600.0)
    asker = await scene.connect()
    asker.send(HELLO)
    asker.send(wire.AskGauges(1))
    answer = await asker.receive()
    assert isinstance(answer, wire.OtherGauges)
    assert len(answer.values) == 1
