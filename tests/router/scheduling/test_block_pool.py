"""Check the prefix cache: exact matches, sharing, and eviction of the least recently used blocks."""

from collections.abc import Hashable

from tgis.router.scheduling.block_pool import BlockPool


def publish_all(pool: BlockPool, root: Hashable, tokens: list[int], blocks: list[int]) -> None:
    prefix: Hashable = root
    for i, block in enumerate(blocks):
        prefix = pool.publish(prefix, tokens[i * pool.block_size : (i + 1) * pool.block_size], block)


def allocate(pool: BlockPool, num_blocks: int) -> list[int]:
    blocks = pool.allocate([], num_blocks)
    assert blocks is not None
    return blocks


def test_the_end_of_a_prefix_is_reused_first() -> None:
    pool = BlockPool(4, 1)
    blocks = allocate(pool, 4)
    publish_all(pool, (), [0, 1, 2, 3], blocks)
    pool.release(blocks)
    allocate(pool, 2)
    assert pool.match((), [0, 1, 2, 3])[0] == blocks[:2]


def test_a_prefix_is_found_only_under_its_own_root() -> None:
    pool = BlockPool(4, 2)
    blocks = allocate(pool, 2)
    publish_all(pool, ("adapter", ""), [1, 2, 3, 4], blocks)
    assert pool.match(("adapter", ""), [1, 2, 3, 4, 5])[0] == blocks
    assert pool.match((), [1, 2, 3, 4, 5])[0] == []


def test_a_partial_block_is_no_prefix() -> None:
    pool = BlockPool(4, 4)
    blocks = allocate(pool, 1)
    publish_all(pool, (), [1, 2, 3, 4], blocks)
    assert pool.match((), [1, 2, 3])[0] == []
    assert pool.match((), [1, 2, 3, 4])[0] == blocks


def test_a_block_published_short_is_found_as_the_end_of_just_its_tokens() -> None:
    pool = BlockPool(4, 4)
    blocks = allocate(pool, 2)
    publish_all(pool, (), [1, 2, 3, 4, 5, 6], blocks)
    assert pool.match((), [1, 2, 3, 4, 5, 6])[0] == blocks
    for longer_or_shorter in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8]):
        assert pool.match((), longer_or_shorter)[0] == blocks[:1]


def test_a_failed_allocation_changes_nothing() -> None:
    pool = BlockPool(3, 1)
    blocks = allocate(pool, 2)
    publish_all(pool, (), [5, 6], blocks)
    pool.release(blocks)
    assert (
        pool.allocate(blocks, 2) is None
    )  # the cached blocks are free, but cannot be both kept and allocated
    assert pool.num_free == 3
    assert pool.allocate(blocks, 1) is not None
    assert pool.num_free == 0


def test_children_of_a_reused_block_are_not_found_through_its_successor() -> None:
    pool = BlockPool(2, 1)
    blocks = allocate(pool, 2)
    publish_all(pool, (), [1, 2], blocks)
    pool.release([blocks[0]])
    [again] = allocate(pool, 1)
    assert again == blocks[0]
    publish_all(pool, (), [1], [again])  # the same token, but under another prefix than [2]
    assert pool.match((), [1, 2])[0] == [again]
