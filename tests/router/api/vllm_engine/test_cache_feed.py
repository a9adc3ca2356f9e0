"""Tests the numbering of cache events and their subscribers, against a plain copy of the blocks."""

import random
from collections.abc import Iterable

import pytest
from smg_grpc_proto.generated import common_pb2 as pb

from tgis.router.api.vllm_engine.cache_feed import (
    HISTORY,
    MAX_BLOCKS,
    MAX_WAITING,
    CacheFeed,
    CacheFeeds,
    Subscription,
)
from tgis.router.errors import RequestError, SlowClientError
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


async def test_a_new_tenants_subscriber_costs_the_others_nothing() -> None:
    pool = BlockPool(8, 2)
    recorder = CacheRecorder(lambda: pool)
    listeners: list[CacheListener] = []

    def watch(listener: CacheListener | None) -> None:
        while listeners:
            recorder.discard(listeners.pop())
        if listener is not None:
            listeners.append(listener)
            recorder.add(listener)

    feeds = CacheFeeds(watch)
    for block, tenant in enumerate(("a", "b")):
        root = decoder_root(Sequence([1, 2], Stopping(1), cache_salt=CacheSalt(tenant)))
        pool.publish(root, (block, block), block)
    with feeds.subscribe("a", 0) as early:
        assert len(await read(early)) == 1
        for tenant, names in (("b", {2}), (None, {1, 2})):
            with feeds.subscribe(tenant, 0) as late:
                apply(blocks := {}, await read(late))
                assert set(blocks) == names
        assert await read(early) == []
    assert not listeners
