"""Prefix cache: finds a sequence's cached blocks, takes them, and publishes its computed ones. Look-ups are
exact, and only under roots that cover everything that keys and values depend on."""

from collections.abc import Hashable
from dataclasses import dataclass

from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.sequence import Sequence


@dataclass(frozen=True)
class Cached:
    """Cached blocks that fit a sequence. No references to them have been taken yet."""

    blocks: list[int]
    """Blocks of its first tokens, all full."""
    prefix: Hashable
    """Name of the prefix that these blocks hold."""
    cross_blocks: list[int]
    """Blocks of the whole encoder output, or none: every position of it depends on the whole input."""
    num_to_encode: int
    """Encoder tokens that are left to compute: all or none."""


def find_cached(pool: BlockPool, sequence: Sequence) -> Cached:
    """Return the blocks of a sequence that need no computation."""
    # The last token is computed in any case, because the next one is sampled from its output.
    usable = len(sequence.token_ids) - 1
    # positions whose details are still to be reported cannot be skipped either
    if not sequence.inputs_reported:
        usable = min(usable, max(sequence.num_inputs_reported - 1, 0))
    blocks, prefix = pool.match(decoder_root(sequence), sequence.token_ids[:usable])
    num_inputs = len(sequence.encoder_token_ids)
    cross_blocks, _ = pool.match(encoder_root(sequence), sequence.encoder_token_ids)
    if len(cross_blocks) < pool.blocks_for(num_inputs):
        return Cached(blocks, prefix, [], num_inputs)
    return Cached(blocks, prefix, cross_blocks, 0)


def waits_for_sibling(pool: BlockPool, sequence: Sequence) -> bool:
    """Return True if a waiting sequence has a sibling that still computes blocks which both can share."""
    newest = sequence.siblings.newest
    # A sequence whose input details are still to be reported computes its whole prompt itself. One with a
    # deadline has no time to wait: an idle service gives it a token, however short its time limit is.
    if newest is None or not sequence.inputs_reported or sequence.stopping.deadline is not None:
        return False
    num_shared = (newest.prompt_len - 1) // pool.block_size
    return newest.num_published < num_shared or newest.num_to_encode > 0


def take_blocks(pool: BlockPool, sequence: Sequence, cached: Cached, num_tokens: int) -> bool:
    """Take blocks for `num_tokens` tokens of a sequence, at least those that it has, and for its encoder
    output. Return False and change nothing if they do not fit."""
    num_cached, num_cross = len(cached.blocks), pool.blocks_for(len(sequence.encoder_token_ids))
    num_new = pool.blocks_for(num_tokens) - num_cached + num_cross - len(cached.cross_blocks)
    blocks = pool.allocate(cached.blocks + cached.cross_blocks, num_new)
    if blocks is None:
        return False
    sequence.cross_blocks = blocks[num_cached : num_cached + num_cross]
    sequence.block_table = blocks[:num_cached] + blocks[num_cached + num_cross :]
    sequence.num_to_encode = cached.num_to_encode
    sequence.num_scheduled = sequence.num_computed = num_cached * pool.block_size
    sequence.num_published, sequence.published_prefix = num_cached, cached.prefix
    sequence.siblings.newest = sequence
    return True


def reset_progress(sequence: Sequence) -> int:
    """Reset a sequence so that all of it is computed again, and return the row that it had."""
    row, sequence.row = sequence.row, None
    assert row is not None, "only running sequences have progress"
    sequence.block_table, sequence.cross_blocks = [], []
    sequence.num_scheduled = sequence.num_computed = sequence.num_published = 0
    if sequence.siblings.newest is sequence:
        sequence.siblings.newest = None
    return row


def publish_computed(pool: BlockPool, sequence: Sequence) -> None:
    """Publish the full blocks of a sequence, as far as they are computed."""
    size = pool.block_size
    for i in range(sequence.num_published, sequence.num_computed // size):
        tokens = sequence.token_ids[i * size : (i + 1) * size]
        prefix, block = sequence.published_prefix, sequence.block_table[i]
        sequence.published_prefix = pool.publish(prefix, tokens, block)
        sequence.num_published = i + 1


def accept_draft(pool: BlockPool, sequence: Sequence) -> None:
    """Count the newest token as computed: it is an accepted draft, so its keys and values are cached."""
    if sequence.row is not None:  # else it was preempted and computes everything again
        sequence.num_computed += 1
        sequence.num_scheduled += 1
        if sequence.num_computed % pool.block_size == 0:
            publish_computed(pool, sequence)


def publish_encoded(pool: BlockPool, sequence: Sequence) -> None:
    """Publish the cross blocks. The last one need not be full, because nothing is ever added to it."""
    size, prefix = pool.block_size, encoder_root(sequence)
    sequence.num_to_encode = 0
    for i, block in enumerate(sequence.cross_blocks):
        tokens = sequence.encoder_token_ids[i * size : (i + 1) * size]
        prefix = pool.publish(prefix, tokens, block)


def decoder_root(sequence: Sequence) -> Hashable:
    """Return a key of all that the decoder's keys and values depend on, besides the tokens before them."""
    return "decoder", *_shared_root(sequence), sequence.is_long


def encoder_root(sequence: Sequence) -> Hashable:
    """Return a key of the whole input: even the first block depends on it, as attention is bidirectional."""
    return "encoder", *_shared_root(sequence)


def _shared_root(sequence: Sequence) -> tuple[Hashable, ...]:
    return sequence.cache_salt, sequence.adapters.prefix_root, sequence.encoder_token_ids
