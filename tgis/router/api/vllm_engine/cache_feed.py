"""Numbers the changes of the prefix cache that a subscriber may see, and sends them to the subscribers."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

from smg_grpc_proto.generated import common_pb2 as pb

from tgis.router.errors import OverloadedError, RequestError, SlowClientError
from tgis.router.scheduling.cache_events import CacheChanges, CacheListener, StoredBlock

MAX_WAITING = 1024  # batches that wait for a slow subscriber before it is cut off
HISTORY = 1024  # batches that a subscriber can resume from
LINGER_S = 30.0
"""Time for which blocks are recorded after the last subscriber has left. The engine lists its whole cache to
begin anew, so clients must not be able to demand that again and again."""
MAX_SUBSCRIPTIONS = 64  # of one feed; each of them looks at the load ten times a second
MAX_BLOCKS = 512  # stored blocks in one batch, so that clients accept its size


class Subscription:
    """Batches of one subscriber that have not been sent yet."""

    def __init__(self, first: Iterator[pb.KvEventBatch]) -> None:
        """Take the batches before those that `put` adds. Each is made when it is sent, because a whole
        snapshot would stop the event loop for long."""
        self._first = first
        self._batches: deque[pb.KvEventBatch] = deque()
        self._arrived = asyncio.Event()
        self._is_cut = False

    def put(self, batch: pb.KvEventBatch) -> None:
        if len(self._batches) >= MAX_WAITING:
            self._is_cut = True
        else:
            self._batches.append(batch)
        self._arrived.set()

    async def next(self, timeout_s: float) -> pb.KvEventBatch | None:
        """Return the next batch, or None if there is none in time. Raises SlowClientError if batches were
        lost because the subscriber did not read them."""
        if not self._is_cut and (batch := next(self._first, None)) is not None:
            return batch
        if not self._batches and not self._is_cut:
            self._arrived.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                return None
        if self._is_cut:
            raise SlowClientError
        return self._batches.popleft()


class CacheFeed:
    def __init__(self, tenant: str | None, blocks: Iterable[StoredBlock] = ()) -> None:
        """Create the feed of one tenant's blocks, of which `blocks` has the present ones. None: the feed of
        all blocks, in which the tenants' names are the salts of their blocks."""
        self._tenant = tenant
        self._blocks = {block.name: block for block in blocks if self._shows(block)}
        self._history: deque[pb.KvEventBatch] = deque(maxlen=HISTORY)
        # The numbers of a restarted router are larger, so that subscribers do not resume from old ones.
        self._sequence = time.time_ns() // 1000
        self._event_ids = count(1)
        self.subscriptions: set[Subscription] = set()

    def subscribe(self, start: int) -> Subscription:
        """Add a subscriber that wants the batches from a sequence number on; 0 begins with all blocks. The
        same happens if the batches are not kept any more. Raises RequestError for a number that is too
        large, and OverloadedError if there are too many subscribers."""
        if len(self.subscriptions) >= MAX_SUBSCRIPTIONS:
            raise OverloadedError(f"at most {MAX_SUBSCRIPTIONS} clients of a tenant may subscribe")
        if start > self._sequence + 1:
            raise RequestError(f"start_sequence_number must be <= {self._sequence + 1}")
        oldest = self._history[0].sequence_number if self._history else self._sequence + 1
        if oldest <= start:
            first = iter([batch for batch in self._history if batch.sequence_number >= start])
        else:
            first = self._snapshot(tuple(self._blocks.values()), self._sequence)
        subscription = Subscription(first)
        self.subscriptions.add(subscription)
        return subscription

    def apply(self, changes: CacheChanges) -> None:
        """Send the visible changes to all subscribers."""
        if changes.is_cleared:
            self._blocks.clear()
        stored = [block for block in changes.stored if self._shows(block)]
        self._blocks.update((block.name, block) for block in stored)
        removed = [name for name in changes.removed if self._blocks.pop(name, None) is not None]
        parts = list(self._list_events(stored, changes.is_cleared))
        if removed:
            parts[-1].append(pb.KvCacheEvent(removed=pb.KvBlocksRemoved(block_hashes=removed)))
        for events in filter(None, parts):
            self._send(events)

    def _send(self, events: list[pb.KvCacheEvent]) -> None:
        for event in events:
            event.event_id = next(self._event_ids)
        self._sequence += 1
        batch = pb.KvEventBatch(sequence_number=self._sequence, timestamp=time.time(), events=events)
        self._history.append(batch)
        for subscription in self.subscriptions:
            subscription.put(batch)

    def _shows(self, block: StoredBlock) -> bool:
        return self._tenant in (None, block.tenant)

    def _snapshot(self, blocks: Sequence[StoredBlock], last: int) -> Iterator[pb.KvEventBatch]:
        """Yield batches of all blocks. Their numbers end with the current one."""
        count = _count_parts(blocks)
        for index, events in enumerate(self._list_events(blocks, is_cleared=True)):
            yield pb.KvEventBatch(
                sequence_number=last - count + 1 + index,
                timestamp=time.time(),
                events=events,
                snapshot=pb.KvSnapshotChunk(index=index, count=count, blocks=len(blocks)),
            )

    def _list_events(
        self, stored: Sequence[StoredBlock], is_cleared: bool
    ) -> Iterator[list[pb.KvCacheEvent]]:
        """Yield the events of each batch for stored blocks, at least one batch. The first one clears all
        earlier blocks if `is_cleared` is set."""
        for index in range(_count_parts(stored)):
            part = stored[index * MAX_BLOCKS : (index + 1) * MAX_BLOCKS]
            events = [pb.KvCacheEvent(stored=run) for run in self._runs(part)]
            if is_cleared and index == 0:
                events.insert(0, pb.KvCacheEvent(cleared=pb.KvCacheCleared()))
            yield events

    def _runs(self, blocks: Iterable[StoredBlock]) -> Iterator[pb.KvBlocksStored]:
        """Yield the blocks in events of blocks that follow each other."""
        run: pb.KvBlocksStored | None = None
        last: int | None = None
        for block in blocks:
            if run is None or block.parent != last:
                if run is not None:
                    yield run
                salt = block.tenant if self._tenant is None and block.tenant else None
                run = pb.KvBlocksStored(parent_block_hash=block.parent, cache_salt=salt)
            run.blocks.add(block_hash=block.name, token_ids=block.token_ids, block_size=len(block.token_ids))
            last = block.name
        if run is not None:
            yield run


def _count_parts(blocks: Sequence[StoredBlock]) -> int:
    """Return the number of batches for stored blocks."""
    return max(-(-len(blocks) // MAX_BLOCKS), 1)


class CacheFeeds:
    """Feeds of all tenants with subscribers, and the operators' feed."""

    def __init__(self, watch: Callable[[CacheListener | None], None]) -> None:
        """`watch` sets the listener to the engine's cache, or removes it."""
        self._watch = watch
        self._feeds: dict[str | None, CacheFeed] = {}
        self._blocks: dict[int, StoredBlock] = {}
        """Blocks of all tenants, so that a new feed costs the others nothing."""
        self._is_watching = False
        self._end: asyncio.TimerHandle | None = None

    @contextmanager
    def subscribe(self, tenant: str | None, start: int) -> Iterator[Subscription]:
        """Add a subscriber to a tenant's blocks, or to all blocks, while the context is open. Raises
        RequestError and OverloadedError."""
        self._begin_watch()
        feed = self._feeds.get(tenant)
        if feed is None:
            feed = self._feeds[tenant] = CacheFeed(tenant, self._blocks.values())
        try:
            subscription = feed.subscribe(start)
            try:
                yield subscription
            finally:
                feed.subscriptions.discard(subscription)
        finally:
            if not feed.subscriptions:
                self._feeds.pop(tenant, None)
            if not self._feeds:
                self._end = asyncio.get_running_loop().call_later(LINGER_S, self._end_watch)

    def _begin_watch(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None
        if not self._is_watching:
            self._is_watching = True
            self._watch(self._apply)

    def _end_watch(self) -> None:
        self._is_watching = False
        self._end = None
        self._watch(None)
        self._blocks.clear()

    def _apply(self, changes: CacheChanges) -> None:
        """Pass changes to the feeds that show them."""
        if changes.is_cleared:
            self._blocks.clear()
        self._blocks.update((block.name, block) for block in changes.stored)
        changed = {block.tenant for block in changes.stored}
        for name in changes.removed:
            if (block := self._blocks.pop(name, None)) is not None:
                changed.add(block.tenant)
        for tenant, feed in self._feeds.items():
            if changes.is_cleared or tenant is None or tenant in changed:
                feed.apply(changes)
