"""Tests the publisher of cache events with real ZMQ sockets as its clients. They know only what vLLM's
clients know: the frames, and arrays in msgpack."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.link_files import free_ports
from tests.support.router.engine_pair import each_of, open_scene
from tgis.config.checks import Setting, SettingsError, check
from tgis.router.engine.handle import SequenceSpec
from tgis.router.errors import StartupError
from tgis.router.scheduling.cache_events import CacheChanges, StoredBlock
from tgis.router.sequence import CacheSalt, Stopping

zmq = pytest.importorskip("zmq", reason="the extra kv-events is not installed")

from tgis.router.engine import kv_events  # noqa: E402 (it imports zmq)
from tgis.router.engine.kv_events import END, MAX_RECEIVED_BYTES, EventLog, KvEvents  # noqa: E402

TIMEOUT_MS = 5000


class Indexer:
    """Copy of the blocks: parent, tokens and extra keys by hash."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], Any]] = {}
        self.number = -1

    def take(self, number: bytes, payload: bytes) -> None:
        self.number = int.from_bytes(number, "big")
        timestamp, events = msgspec.msgpack.decode(payload)
        assert timestamp > 1.7e9
        for event in events:
            match event:
                case ["BlockStored", hashes, parent, token_ids, size, None, None, None, keys]:
                    extra_keys = keys or [None] * len(hashes)
                    for index, each in enumerate(hashes):
                        tokens = tuple(token_ids[index * size : (index + 1) * size])
                        self.blocks[each] = parent, tokens, extra_keys[index]
                        parent = each
                case ["BlockRemoved", hashes, None]:
                    for each in hashes:
                        del self.blocks[each]
                case ["AllBlocksCleared"]:
                    self.blocks.clear()
                case _:
                    raise AssertionError(event)

    def has(self, blocks: dict[int, StoredBlock]) -> bool:
        """Return True if these are the blocks, under hashes that differ from their names by one number."""
        if len(blocks) != len(self.blocks):
            return False
        if not blocks:
            return True
        base = min(self.blocks) - min(blocks)
        return self.blocks == {
            base + block.name: (
                None if block.parent is None else base + block.parent,
                block.token_ids,
                [block.tenant] if block.tenant else None,
            )
            for block in blocks.values()
        }


def change(r: random.Random, known: dict[int, StoredBlock], first: int) -> CacheChanges:
    """Make a random change of the known blocks. New names begin with `first`."""
    is_cleared = r.random() < 0.05
    if is_cleared:
        known.clear()
    stored: list[StoredBlock] = []
    for name in range(first, first + r.randrange(6)):
        before = r.choice([None, *stored])
        tenant = r.choice(["", "acme"]) if before is None else before.tenant
        stored.append(StoredBlock(name, before.name if before else None, (name, r.randrange(9)), tenant))
    known.update((block.name, block) for block in stored)
    removed = tuple(name for name in known if r.random() < 0.1)
    for name in removed:
        del known[name]
    return CacheChanges(is_cleared, tuple(stored), removed)


@pytest.mark.parametrize("seed", range(20))
def test_indexers_know_the_blocks_whenever_they_begin(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_BLOCKS", 3)
    monkeypatch.setattr(kv_events, "HISTORY", 8)
    r, log, early = random.Random(seed), EventLog(), Indexer()
    known: dict[int, StoredBlock] = {}
    for turn in range(40):
        for message in log.add(change(r, known, 10 * turn + 1)):
            assert int.from_bytes(message.frames[0], "big") == early.number + 1
            early.take(*message.frames)
        assert early.has(known)
        late = Indexer()
        for message in log.replay(0):
            late.take(*message.frames)
        assert late.has(known)
        assert not known or late.number == early.number
    assert list(log.replay(early.number + 1)) == []
    [last] = log.replay(early.number)
    assert last.number == early.number


@contextmanager
def client(kind: int, address: str) -> Iterator[Any]:
    with zmq.Context() as context, context.socket(kind) as opened:
        opened.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        opened.setsockopt(zmq.LINGER, 0)
        opened.connect(address)
        yield opened


def replayed(requester: Any, start: int) -> Iterator[list[bytes]]:
    requester.send_multipart([b"", start.to_bytes(8, "big")])
    while True:
        delimiter, number, payload = requester.recv_multipart()
        assert delimiter == b""
        if number == END:
            assert payload == b""
            return
        yield [number, payload]


async def test_the_blocks_of_a_prompt_are_published_and_replayed(tmp_path: Path) -> None:
    port = free_ports()
    address, replay = (f"tcp://127.0.0.1:{port + offset}" for offset in range(2))
    options = {"kv_events_replay_endpoint": replay, "kv_events_topic": "kv@pod@model"}
    prompt = tuple(range(3, 60))
    async with open_scene(tmp_path, is_split=False, kv_events_endpoint=address, **options) as scene:
        with client(zmq.SUB, address) as subscriber, client(zmq.DEALER, replay) as requester:
            subscriber.subscribe("kv@")
            await asyncio.to_thread(subscriber.poll, 200)  # a subscription takes a moment
            size = scene.shard.info.block_size
            claim_id = await scene.handle.acquire(1)
            spec = SequenceSpec(prompt, Stopping(1), cache_salt=CacheSalt("acme"))
            sequence_id = scene.handle.open(claim_id, spec, None)
            assert [event async for event in each_of(scene.handle.events(sequence_id))]
            scene.handle.release(claim_id)
            indexer = Indexer()
            while not indexer.blocks:
                topic, *frames = await asyncio.to_thread(subscriber.recv_multipart)
                assert topic == b"kv@pod@model"
                indexer.take(*frames)
            wanted = [prompt[start : start + size] for start in range(0, len(prompt) - size + 1, size)]
            assert [block[1:] for block in indexer.blocks.values()] == [(each, ["acme"]) for each in wanted]
            assert [block[0] for block in indexer.blocks.values()] == [None, *list(indexer.blocks)[:-1]]
            again = Indexer()
            for frames in await asyncio.to_thread(lambda: list(replayed(requester, 0))):
                again.take(*frames)
            assert again.blocks == indexer.blocks
            requester.send_multipart([b"", b"not a number"])  # it is ignored
            assert await asyncio.to_thread(lambda: list(replayed(requester, indexer.number + 1))) == []


@pytest.mark.parametrize("option", ["kv_events_endpoint", "kv_events_replay_endpoint"])
def test_options_have_addresses_that_clients_can_reach(option: str) -> None:
    """ZMQ itself opens port 34463 for 99999."""
    options = {"kv_events_endpoint": Setting("tcp://*:5557")}
    for address in ("tcp://eth0:1", "tcp://[::1]:65535", "ipc:///tmp/a", "tcp://127.0.0.1:5557"):
        assert check(options | {option: Setting(address)}, (), ()) == []
    for address in (
        "tcp://*:99999",
        "tcp://*:-1",
        "tcp://*:0",
        "tcp://*:*",
        "tcp://*",
        "inproc://a",
        "a\ud800",
    ):
        with pytest.raises(SettingsError, match=f"^{option}: an address is tcp://HOST:PORT or ipc://PATH$"):
            check(options | {option: Setting(address)}, (), ())


async def test_an_address_that_cannot_be_opened_is_refused() -> None:
    with pytest.raises(
        StartupError, match=r"^kv_events_endpoint: tcp://nowhere cannot be opened: [A-Z][a-z ]+$"
    ):
        KvEvents("tcp://nowhere", None, "")
    address = f"tcp://127.0.0.1:{free_ports()}"
    first = KvEvents(address, None, "")
    with pytest.raises(StartupError, match=rf"^kv_events_replay_endpoint: {address} cannot be opened: "):
        KvEvents(address.replace("127.0.0.1", "127.0.0.2"), address, "")
    first.close()


@pytest.mark.slow
async def test_any_number_of_replay_requests_leaves_time_for_the_engine() -> None:
    """The client reads no answer. Without a limit, its requests would occupy one turn of the event loop."""
    port = free_ports()
    address, replay = (f"tcp://127.0.0.1:{port + offset}" for offset in range(2))
    publisher = KvEvents(address, replay, "")
    for name in range(1, 300):
        publisher._publish(CacheChanges(False, (StoredBlock(name, None, (name, name), ""),), ()))
    with client(zmq.DEALER, replay) as requester:
        for _ in range(1000):
            requester.send_multipart([b"", bytes(8)])
        requester.send_multipart([b"", bytes(MAX_RECEIVED_BYTES + 1)])  # it ends the connection
        await asyncio.to_thread(requester.poll, TIMEOUT_MS)
        turns = 0
        while publisher._pause is not None:
            turns += 1
            await asyncio.sleep(0.001)
        assert turns > 20
    publisher.close()
