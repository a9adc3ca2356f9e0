"""Tests the numbering of cache events and their subscribers, against a plain copy of the blocks."""

import asyncio
import random
from collections.abc import Iterable
from contextlib import ExitStack

import pytest
from smg_grpc_proto.generated import common_pb2 as pb

from tgis.router.api.vllm_engine.cache_feed import (
    HISTORY,
    MAX_BLOCKS,
    MAX_SUBSCRIPTIONS,
    MAX_WAITING,
    CacheFeed,
    CacheFeeds,
    Subscription,
)
from tgis.router.errors import OverloadedError, RequestError, SlowClientError
from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.cache_events import CacheChanges, CacheListener, CacheRecorder, StoredBlock
from tgis.router.scheduling.prefix_cache import decoder_root
from tgis.router.sequence import CacheSalt, Sequence, Stopping

Blocks = dict[int, tuple[int | None, tuple[int, ...]]]
"""Parent and tokens of blocks by their names."""


def stored(first: int, count: int, tenant: str = "") -> tuple[StoredBlock, ...]:
    """Return a chain of blocks."""
    return tuple(
        StoredBlock(name, name - 1 if name > first else None, (name, name + 1), tenant)
        for name in range(first, first + count)
    )


async def read(subscription: Subscription) -> list[pb.KvEventBatch]:
    batches = []
    while (batch := await subscription.next(0)) is not None:
        batches.append(batch)
    return batches


def apply(blocks: Blocks, batches: Iterable[pb.KvEventBatch]) -> None:
    """Change the copy as a subscriber would."""
    for event in (event for batch in batches for event in batch.events):
        if event.HasField("cleared"):
            blocks.clear()
        for name in event.removed.block_hashes:
            del blocks[name]
        parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
        for block in event.stored.blocks:
            blocks[block.block_hash] = parent, tuple(block.token_ids)
            parent = block.block_hash


async def test_many_blocks_are_sent_in_several_batches() -> None:
    feed = CacheFeed("")
    early = feed.subscribe(0)
    feed.apply(CacheChanges(True, stored(1, 3 * MAX_BLOCKS), ()))
    late = feed.subscribe(0)
    for subscription in (early, late):
        batches = await read(subscription)
        assert max(sum(len(event.stored.blocks) for event in batch.events) for batch in batches) <= MAX_BLOCKS
        numbers = [batch.sequence_number for batch in batches]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        apply(blocks := {}, batches)
        assert blocks == {each.name: (each.parent, each.token_ids) for each in stored(1, 3 * MAX_BLOCKS)}


@pytest.mark.parametrize("seed", range(20))
async def test_subscribers_have_equal_blocks_whenever_they_begin(seed: int) -> None:
    r, feed = random.Random(seed), CacheFeed("a")
    copies: list[tuple[Subscription, Blocks]] = []
    known: Blocks = {}
    name = 1
    for _ in range(60):
        if r.random() < 0.2:
            copies.append((feed.subscribe(0), {}))
        new, others = stored(name, r.randrange(4), "a"), stored(name + 10, r.randrange(3), "b")
        name += 20
        is_cleared = r.random() < 0.05
        if is_cleared:
            known.clear()
        known.update({each.name: (each.parent, each.token_ids) for each in new})
        removed = tuple(each for each in known if r.random() < 0.1)
        for each in removed:
            del known[each]
        feed.apply(CacheChanges(is_cleared, new + others, (*removed, name - 10)))
        for subscription, blocks in copies:
            apply(blocks, await read(subscription))
            assert blocks == known


async def test_a_subscriber_resumes_after_the_batches_that_it_has() -> None:
    feed = CacheFeed("")
    [first] = await read(feed.subscribe(0))
    for name in range(1, 5):
        feed.apply(CacheChanges(False, stored(name, 1), ()))
    resumed = await read(feed.subscribe(first.sequence_number + 3))
    assert [batch.events[0].stored.blocks[0].block_hash for batch in resumed] == [3, 4]
    assert await read(feed.subscribe(first.sequence_number + 5)) == []
    with pytest.raises(RequestError, match=f"must be <= {first.sequence_number + 5}"):
        feed.subscribe(first.sequence_number + 6)
    for name in range(5, 5 + HISTORY):
        feed.apply(CacheChanges(False, stored(name, 1), ()))
    [batch, *_] = await read(feed.subscribe(first.sequence_number + 3))
    assert batch.HasField("snapshot"), "the next batch is not kept any more"


async def test_a_subscriber_that_does_not_read_is_cut_off() -> None:
    feed = CacheFeed("")
    slow, quick = feed.subscribe(0), feed.subscribe(0)
    for name in range(1, MAX_WAITING + 2):
        feed.apply(CacheChanges(False, stored(name, 1), ()))
        await read(quick)
    with pytest.raises(SlowClientError):
        await slow.next(0)


async def test_a_subscriber_may_read_what_came_before_it_slowly() -> None:
    """It is cut off because of later batches only."""
    feed = CacheFeed("")
    [first] = await read(feed.subscribe(0))
    for name in range(1, HISTORY + 1):
        feed.apply(CacheChanges(False, stored(name, 1), ()))
    subscription = feed.subscribe(first.sequence_number + 1)
    feed.apply(CacheChanges(False, stored(HISTORY + 1, 1), ()))
    assert len(await read(subscription)) == HISTORY + 1


class Cache:
    """Pool with the feeds that report its blocks, as in a router without workers."""

    def __init__(self) -> None:
        self.pool = BlockPool(8, 2)
        self._recorder = CacheRecorder(lambda: self.pool)
        self.listener: CacheListener | None = None
        self.num_listings = 0
        self.feeds = CacheFeeds(self._watch)

    def _watch(self, listener: CacheListener | None) -> None:
        if self.listener is not None:
            self._recorder.discard(self.listener)
        self.listener = listener
        if listener is not None:
            self.num_listings += 1
            self._recorder.add(listener)

    def publish(self, tenant: str, block: int) -> None:
        root = decoder_root(Sequence([1, 2], Stopping(1), cache_salt=CacheSalt(tenant)))
        self.pool.publish(root, (block, block), block)


async def names_of(subscription: Subscription) -> set[int]:
    apply(blocks := {}, await read(subscription))
    return set(blocks)


async def test_a_new_tenants_subscriber_costs_the_others_nothing() -> None:
    cache = Cache()
    cache.publish("a", 0)
    cache.publish("b", 1)
    with cache.feeds.subscribe("a", 0) as early:
        assert await names_of(early) == {1}
        for tenant, names in (("b", {2}), (None, {1, 2})):
            with cache.feeds.subscribe(tenant, 0) as late:
                assert await names_of(late) == names
        assert await read(early) == []


@pytest.mark.usefixtures("steady_clock")
async def test_the_cache_is_listed_again_only_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tgis.router.api.vllm_engine.cache_feed.LINGER_S", 0.2)
    cache = Cache()
    for block in range(8):
        cache.publish("a", block)
        await asyncio.sleep(0)
        with cache.feeds.subscribe("a", 0) as subscription:
            assert await names_of(subscription) == set(range(1, block + 2))
    assert cache.num_listings == 1
    await asyncio.sleep(0.6)
    assert cache.listener is None
    with cache.feeds.subscribe("a", 0) as subscription:
        assert await names_of(subscription) == set(range(1, 9))
        await asyncio.sleep(0.6)
        assert cache.listener is not None, "there is a subscriber"
    assert cache.num_listings == 2


async def test_each_feed_gets_its_own_changes() -> None:
    cache, tenants = Cache(), ("a", "b", None)
    with ExitStack() as stack:
        subscriptions = [stack.enter_context(cache.feeds.subscribe(tenant, 0)) for tenant in tenants]
        for each in subscriptions:
            assert await names_of(each) == set()
        cache.publish("a", 0)
        await asyncio.sleep(0)
        assert [await names_of(each) for each in subscriptions] == [{1}, set(), {1}]
        blocks = cache.pool.allocate([], 8)  # the published block is reused
        assert blocks is not None
        await asyncio.sleep(0)
        events = [[event for batch in await read(each) for event in batch.events] for each in subscriptions]
        assert [[list(event.removed.block_hashes) for event in each] for each in events] == [[[1]], [], [[1]]]
        cache.pool.forget()
        await asyncio.sleep(0)
        assert [len(await read(each)) for each in subscriptions] == [1, 1, 1]


async def test_a_tenant_has_few_subscribers() -> None:
    feeds = Cache().feeds
    with ExitStack() as stack:
        for _ in range(MAX_SUBSCRIPTIONS):
            last = stack.enter_context(ExitStack())
            last.enter_context(feeds.subscribe("a", 0))
        with pytest.raises(OverloadedError, match="at most 64 clients of a tenant"), feeds.subscribe("a", 0):
            pass
        with feeds.subscribe("b", 0):
            last.close()
            stack.enter_context(feeds.subscribe("a", 0))
