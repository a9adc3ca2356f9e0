"""What of a sequence the cache holds already, the blocks that it takes, and what of it others may find:
exact, and only under what keys and values depend on."""

from collections.abc import Hashable
from dataclasses import dataclass

from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.sequence import Sequence


@dataclass(frozen=True)
class Cached:
    """Blocks that the pool holds for a sequence; nobody has taken references yet."""

    blocks: list[int]
    """Of its first tokens, all of them full ..."""
    prefix: Hashable
    """... and the prefix that they spell."""
    cross_blocks: list[int]
    """All of its encoder's output or nothing: every position of it has seen the whole input."""
    num_to_encode: int
    """Encoder tokens that are left to compute: all or none."""


def find_cached(pool: BlockPool, sequence: Sequence) -> Cached:
    """What needs no computing."""
    # The last token is computed in any case: the next is sampled from it.
    usable = len(sequence.token_ids) - 1
    if not sequence.inputs_reported:  # nor may positions be skipped whose outcome is still to be reported
        usable = min(usable, max(sequence.num_inputs_reported - 1, 0))
    blocks, prefix = pool.match(decoder_root(sequence), sequence.token_ids[:usable])
    num_inputs = len(sequence.encoder_token_ids)
    cross_blocks, _ = pool.match(encoder_root(sequence), sequence.encoder_token_ids)
    if len(cross_blocks) < pool.blocks_for(num_inputs):
        return Cached(blocks, prefix, [], num_inputs)
    return Cached(blocks, prefix, cross_blocks, 0)


def take_blocks(pool: BlockPool, sequence: Sequence, cached: Cached) -> bool:
    """For all tokens it has and for its encoder's output; False, and no change, when they do not fit."""
    num_cached, num_cross = len(cached.blocks), pool.blocks_for(len(sequence.encoder_token_ids))
    num_new = pool.blocks_for(len(sequence.token_ids)) - num_cached + num_cross - len(cached.cross_blocks)
    blocks = pool.allocate(cached.blocks + cached.cross_blocks, num_new)
    if blocks is None:
        return False
    sequence.cross_blocks = blocks[num_cached : num_cached + num_cross]
    sequence.block_table = blocks[:num_cached] + blocks[num_cached + num_cross :]
    sequence.num_to_encode = cached.num_to_encode
    sequence.num_scheduled = sequence.num_computed = num_cached * pool.block_size
    sequence.num_published, sequence.published_prefix = num_cached, cached.prefix
    return True


def forget_place(sequence: Sequence) -> int:
    """All of it is to be computed again; gives the row that it had."""
    row, sequence.row = sequence.row, None
    assert row is not None, "only what runs has a place"
    sequence.block_table, sequence.cross_blocks = [], []
    sequence.num_scheduled = sequence.num_computed = sequence.num_published = 0
    return row


def publish_computed(pool: BlockPool, sequence: Sequence) -> None:
    """Its full blocks, as far as they are computed."""
    size = pool.block_size
    for i in range(sequence.num_published, sequence.num_computed // size):
        tokens = sequence.token_ids[i * size : (i + 1) * size]
        prefix, block = sequence.published_prefix, sequence.block_table[i]
        sequence.published_prefix = pool.publish(prefix, tokens, block)
        sequence.num_published = i + 1


def accept_draft(pool: BlockPool, sequence: Sequence) -> None:
    """Its newest token is the draft of which keys and values have been computed; the next one follows."""
    if sequence.row is not None:  # else it was preempted, and computes everything again
        sequence.num_computed += 1
        sequence.num_scheduled += 1
        if sequence.num_computed % pool.block_size == 0:
            publish_computed(pool, sequence)


def publish_encoded(pool: BlockPool, sequence: Sequence) -> None:
    """Its cross blocks, the last of which need not be full: nothing is ever added to them."""
    size, prefix = pool.block_size, encoder_root(sequence)
    for i, block in enumerate(sequence.cross_blocks):
        tokens = sequence.encoder_token_ids[i * size : (i + 1) * size]
        prefix = pool.publish(prefix, tokens, block)


def decoder_root(sequence: Sequence) -> Hashable:
    """What all the decoder's keys and values depend on, beside the tokens up to their own."""
    return "decoder", sequence.prefix_root, sequence.encoder_token_ids, sequence.is_long


def encoder_root(sequence: Sequence) -> Hashable:
    """The encoder looks both ways, so the first block's content already depends on all of the input."""
    return "encoder", sequence.prefix_root, sequence.encoder_token_ids
