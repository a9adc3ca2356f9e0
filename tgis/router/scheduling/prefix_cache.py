"""Prefix cache: finds and takes a sequence's cached blocks, and publishes its computed blocks. Look-ups are
exact. Their roots include everything that keys and values depend on."""

from collections.abc import Hashable
from dataclasses import dataclass

from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.state_pool import StatePool
from tgis.router.sequence import CacheSalt, Sequence

UNREACHABLE = ("unreachable",)
"""Root of blocks that no look-up finds."""


@dataclass(frozen=True)
class Cached:
    """Cached blocks that match a sequence, without references to them yet."""

    blocks: list[int]
    """Full blocks of its first tokens."""
    prefix: Hashable
    """Identifier of the prefix in these blocks."""
    cross_blocks: list[int]
    """Blocks of the whole encoder output, or none, because every position depends on the whole input."""
    num_to_encode: int
    """Number of encoder tokens to compute: all or none."""
    state_source: int | None = None
    """Slot with the state after the cached blocks, if there are blocks and the model keeps a state."""


def find_cached(pool: BlockPool, sequence: Sequence) -> Cached:
    """Return the cached blocks of a sequence, which need no computation."""
    # The last token is always computed, because the next one is sampled from its output.
    usable = len(sequence.token_ids) - 1
    # Positions whose token details must be reported are computed too.
    if not sequence.inputs_reported:
        usable = min(usable, max(sequence.num_inputs_reported - 1, 0))
    blocks, prefix = pool.match(decoder_root(sequence), sequence.token_ids[:usable])
    if pool.states is not None:
        return _cut_to_snapshot(pool, pool.states, blocks, prefix)
    num_inputs = len(sequence.encoder_token_ids)
    cross_blocks, _ = pool.match(encoder_root(sequence), sequence.encoder_token_ids)
    if len(cross_blocks) < pool.blocks_for(num_inputs):
        return Cached(blocks, prefix, [], num_inputs)
    return Cached(blocks, prefix, cross_blocks, 0)


def _cut_to_snapshot(pool: BlockPool, states: StatePool, blocks: list[int], prefix: Hashable) -> Cached:
    """Return the longest of these blocks' prefixes after which there is a snapshot of the state."""
    while blocks and prefix not in states:
        prefix = pool.prefix_before(blocks.pop())
    return Cached(blocks, prefix, [], 0, states.find(prefix) if blocks else None)


def waits_for_sibling(pool: BlockPool, sequence: Sequence) -> bool:
    """Return True if a sibling of a waiting sequence is still computing blocks that both can share."""
    newest = sequence.siblings.newest
    # A sequence that must report input details computes its whole prompt itself. A sequence with a deadline
    # does not wait, so that an idle service generates a token within any time limit.
    if newest is None or not sequence.inputs_reported or sequence.stopping.deadline is not None:
        return False
    num_shared = (newest.prompt_len - 1) // pool.block_size
    return newest.num_published < num_shared or newest.num_to_encode > 0


def take_blocks(pool: BlockPool, sequence: Sequence, cached: Cached, num_tokens: int) -> bool:
    """Take blocks for `num_tokens` tokens of a sequence, at least its current tokens, and for its encoder
    output, and a slot for its state. Return False and change nothing if the pool has too few."""
    if pool.states is not None and not pool.states.num_available:
        return False
    num_cached = len(cached.blocks)
    num_cross = pool.blocks_for(len(sequence.encoder_token_ids))
    num_new = pool.blocks_for(num_tokens) - num_cached + num_cross - len(cached.cross_blocks)
    blocks = pool.allocate(cached.blocks + cached.cross_blocks, num_new)
    if blocks is None:
        return False
    sequence.cross_blocks = blocks[num_cached : num_cached + num_cross]
    sequence.block_table = blocks[:num_cached] + blocks[num_cached + num_cross :]
    sequence.num_to_encode = cached.num_to_encode
    sequence.num_scheduled = sequence.num_computed = num_cached * pool.block_size
    sequence.num_published = num_cached
    sequence.published_prefix = cached.prefix
    sequence.siblings.newest = sequence
    if pool.states is not None:
        sequence.state_slot = pool.states.take()
        sequence.state_source = cached.state_source
    return True


def reset_progress(sequence: Sequence) -> int:
    """Reset a sequence so that all of it is computed again, and return its former row."""
    row = sequence.row
    sequence.row = None
    assert row is not None, "only running sequences have progress"
    sequence.block_table = []
    sequence.cross_blocks = []
    sequence.state_slot = sequence.state_source = None
    sequence.num_scheduled = sequence.num_computed = sequence.num_published = 0
    if sequence.siblings.newest is sequence:
        sequence.siblings.newest = None
    return row


def publish_computed(pool: BlockPool, sequence: Sequence) -> None:
    """Publish the fully computed blocks of a sequence."""
    size = pool.block_size
    for i in range(sequence.num_published, sequence.num_computed // size):
        tokens = sequence.token_ids[i * size : (i + 1) * size]
        block = sequence.block_table[i]
        sequence.published_prefix = pool.publish(sequence.published_prefix, tokens, block)
        sequence.num_published = i + 1


def accept_draft(pool: BlockPool, sequence: Sequence) -> None:
    """Count the newest token, an accepted draft, as computed: its keys and values are already cached."""
    if sequence.row is not None:  # a preempted sequence is computed again from the beginning
        sequence.num_computed += 1
        sequence.num_scheduled += 1
        if sequence.num_computed % pool.block_size == 0:
            publish_computed(pool, sequence)


def publish_encoded(pool: BlockPool, sequence: Sequence) -> None:
    """Publish the cross blocks. The last one need not be full, because no tokens are ever added to it."""
    size = pool.block_size
    prefix = encoder_root(sequence)
    sequence.num_to_encode = 0
    for i, block in enumerate(sequence.cross_blocks):
        tokens = sequence.encoder_token_ids[i * size : (i + 1) * size]
        prefix = pool.publish(prefix, tokens, block)


def stop_following(sequence: Sequence) -> None:
    """Note that the shards' speculator no longer follows a sequence. Its further blocks lack the speculator's
    keys and values, so no sequence may find them after those that have them."""
    if sequence.is_followed:
        sequence.is_followed = False
        sequence.published_prefix = UNREACHABLE


def publish_state(pool: BlockPool, sequence: Sequence, end: int, slot: int) -> None:
    """Publish a snapshot of the state after `end` tokens, unless the sequence has been stopped since."""
    assert pool.states is not None, "the slot is one of the pool's"
    if sequence.row is not None and sequence.num_published * pool.block_size == end:
        pool.states.publish(sequence.published_prefix, slot)
    else:
        pool.states.release(slot)


def decoder_root(sequence: Sequence) -> Hashable:
    """Return a key of everything that the decoder's KV cache depends on, except its tokens."""
    # A speculator has keys and values of its own in the blocks of the sequences that it follows.
    return "decoder", *_shared_root(sequence), sequence.is_long, sequence.is_followed


def encoder_root(sequence: Sequence) -> Hashable:
    """Return a key of the whole input, because with bidirectional attention even the first block depends on
    it."""
    return "encoder", *_shared_root(sequence)


def tenant_of_root(root: Hashable) -> str | None:
    """Return the tenant whose sequences find the blocks after a root by their tokens alone. Return None if
    they also need a salt, an adapter or an encoder's input."""
    match root:
        case ("decoder", CacheSalt(tenant=tenant, salt=b""), (), (), _, _):
            return tenant
    return None


def _shared_root(sequence: Sequence) -> tuple[Hashable, ...]:
    return sequence.cache_salt, sequence.adapters.prefix_root, sequence.encoder_token_ids
