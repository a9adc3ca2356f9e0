"""Publishes the changes of the prefix cache over ZMQ, in the form of vLLM's publisher, for cache indexers.

Each message has three frames: the topic, a number of 8 bytes in big-endian order, and a batch in msgpack. A
client that has missed batches asks the replay socket for those from a number on. Anyone who can connect reads
the tokens of all prompts."""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec
import zmq

from tgis.router.errors import StartupError
from tgis.router.scheduling.cache_events import CacheChanges, CacheRecorder, StoredBlock

MAX_BLOCKS = 512  # stored blocks in one batch
HISTORY = 1024  # batches that can be replayed
MAX_QUEUED = 1024  # batches that wait for a slow subscriber, which loses further ones
MAX_RECEIVED_BYTES = 4096  # one frame of a client, whose requests and subscriptions are short
SLICE_S, PAUSE_S = 0.002, 0.008
"""Time for answers to replay requests, and time until their next slice. They share the event loop with the
engine, and clients may send any number of requests."""
END = (-1).to_bytes(8, "big", signed=True)
"""Number of the last answer to a replay request."""


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class BlockStored(_Event, frozen=True, tag="BlockStored"):
    """Blocks that follow each other. The fields are vLLM's, in its order."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: None
    lora_name: None = None
    extra_keys: list[list[str]] | None = None
    """For each block, what its hash depends on besides tokens: the tenant, if it has a name."""


class BlockRemoved(_Event, frozen=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: None


class AllBlocksCleared(_Event, frozen=True, tag="AllBlocksCleared"):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[Event]


class NumberedBatch(NamedTuple):
    number: int
    payload: bytes

    @property
    def frames(self) -> tuple[bytes, bytes]:
        return self.number.to_bytes(8, "big"), self.payload


class EventLog:
    """Numbered batches, of which the newest are kept."""

    def __init__(self) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        # Indexers may keep the hashes of several services in one table.
        self._base = secrets.randbits(62)
        self._blocks: dict[int, StoredBlock] = {}
        self._history: deque[NumberedBatch] = deque(maxlen=HISTORY)
        self._number = 0

    def add(self, changes: CacheChanges) -> list[NumberedBatch]:
        """Return the messages that report the changes."""
        if changes.is_cleared:
            self._blocks.clear()
        self._blocks.update((block.name, block) for block in changes.stored)
        removed = [name for name in changes.removed if self._blocks.pop(name, None) is not None]
        payloads = self._encode_parts(_parts(changes.stored), changes.is_cleared, removed)
        messages = [NumberedBatch(self._number + index, payload) for index, payload in enumerate(payloads)]
        self._number += len(messages)
        self._history += messages
        return messages

    def replay(self, start: int) -> Iterator[NumberedBatch]:
        """Return the messages from a number on. If some are not kept any more, return all present blocks
        under the numbers before the next one, and encode each message when it is read."""
        if not self._history or start >= self._history[0].number:
            return iter([message for message in self._history if message.number >= start])
        parts = _parts(tuple(self._blocks.values()))
        payloads = self._encode_parts(parts, is_cleared=True)
        return map(NumberedBatch, range(self._number - len(parts), self._number), payloads)

    def _encode_parts(
        self, parts: list[Sequence[StoredBlock]], is_cleared: bool, removed: Sequence[int] = ()
    ) -> Iterator[bytes]:
        clearing: list[Event] = [AllBlocksCleared()] if is_cleared else []
        removals: list[Event] = [BlockRemoved(list(map(self._hash, removed)), None)] if removed else []
        for index, part in enumerate(parts):
            events = clearing if index == 0 else []
            events = events + [self._stored(run) for run in _runs(part)]
            events += removals if index == len(parts) - 1 else []
            if events:
                yield self._encode(EventBatch(time.time(), events))

    def _stored(self, run: list[StoredBlock]) -> BlockStored:
        first = run[0]
        return BlockStored(
            [self._hash(block.name) for block in run],
            None if first.parent is None else self._hash(first.parent),
            list(chain.from_iterable(block.token_ids for block in run)),
            len(first.token_ids),
            None,
            None,
            extra_keys=[[first.tenant]] * len(run) if first.tenant else None,
        )

    def _hash(self, name: int) -> int:
        return self._base + name


class KvEvents:
    """Sockets of the publisher. A slow or silent client delays nothing."""

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: str) -> None:
        """Bind the sockets. Raises StartupError."""
        self._topic = topic.encode()
        self._log = EventLog()
        self._context = zmq.Context(io_threads=1)
        self._recorder: CacheRecorder | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self._answers: Iterator[tuple[bytes, ...]] = iter(())
        """Messages that are still to be sent for the current replay request."""
        self._pause: asyncio.TimerHandle | None = None
        try:
            self._events = self._bind("kv_events_endpoint", zmq.PUB, endpoint, MAX_QUEUED)
            if replay_endpoint is not None:
                self._replay = self._bind(
                    "kv_events_replay_endpoint", zmq.ROUTER, replay_endpoint, HISTORY + 1
                )
                asyncio.get_running_loop().add_reader(self._replay.fileno(), self._answer)
        except StartupError:
            self.close()
            raise

    def follow(self, recorder: CacheRecorder) -> None:
        """Publish all blocks, and changes from now on."""
        self._recorder = recorder
        recorder.add(self._publish)

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.discard(self._publish)
        if self._replay is not None:
            asyncio.get_running_loop().remove_reader(self._replay.fileno())
        if self._pause is not None:
            self._pause.cancel()
        self._context.destroy(linger=0)

    def _bind(self, option: str, kind: int, endpoint: str, max_queued: int) -> "zmq.Socket[bytes]":
        created = self._context.socket(kind)
        created.setsockopt(zmq.SNDHWM, max_queued)
        created.setsockopt(zmq.IPV6, 1)
        created.setsockopt(zmq.MAXMSGSIZE, MAX_RECEIVED_BYTES)
        try:
            created.bind(endpoint)
        except zmq.ZMQError as error:
            reason = zmq.strerror(error.errno or 0)  # the error's own text repeats the address
            raise StartupError(f"{option}: {endpoint} cannot be opened: {reason}") from error
        return created

    def _publish(self, changes: CacheChanges) -> None:
        for message in self._log.add(changes):
            self._events.send_multipart((self._topic, *message.frames), zmq.NOBLOCK)

    def _answer(self) -> None:
        """Answer replay requests until there are none or a slice has ended. The descriptor reports only that
        the socket's state has changed."""
        assert self._replay is not None
        if self._pause is not None:
            return
        end = time.monotonic() + SLICE_S
        while time.monotonic() < end:
            if (frames := next(self._answers, None)) is not None:
                self._replay.send_multipart(frames, zmq.NOBLOCK)
            elif self._replay.poll(0):
                self._answers = self._answers_to(self._replay.recv_multipart(zmq.NOBLOCK))
            else:
                return
        self._pause = asyncio.get_running_loop().call_later(PAUSE_S, self._continue)

    def _continue(self) -> None:
        self._pause = None
        self._answer()

    def _answers_to(self, request: list[bytes]) -> Iterator[tuple[bytes, ...]]:
        match request:
            case [client, delimiter, start] if len(start) == 8:
                messages = self._log.replay(int.from_bytes(start, "big"))
                frames = chain((message.frames for message in messages), [(END, b"")])
                return ((client, delimiter, *each) for each in frames)
        return iter(())


def _parts(blocks: Sequence[StoredBlock]) -> list[Sequence[StoredBlock]]:
    """Return the blocks of each batch, at least one batch."""
    return [blocks[start : start + MAX_BLOCKS] for start in range(0, max(len(blocks), 1), MAX_BLOCKS)]


def _runs(blocks: Iterable[StoredBlock]) -> Iterator[list[StoredBlock]]:
    """Yield lists of blocks that follow each other."""
    run: list[StoredBlock] = []
    for block in blocks:
        if run and block.parent != run[-1].name:
            yield run
            run = []
        run.append(block)
    if run:
        yield run
