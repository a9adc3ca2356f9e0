"""Pool of cache blocks. It tracks which blocks are free, which are shared and which prefix each published
block holds. The bookkeeping is exact and uses no tensors."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import count
from typing import Protocol

from tgis.router.metrics.resource_counts import ResourceCount
from tgis.router.scheduling.state_pool import StatePool

Edge = tuple[Hashable, tuple[int, ...]]
"""Prefix, and the tokens of one block after it."""


class PoolListener(Protocol):
    """Listener to the changes of the published prefixes."""

    def store(self, name: int, edge: Edge) -> None:
        """Record that a prefix, identified by `name`, can be found."""

    def remove(self, name: int) -> None: ...

    def clear(self) -> None: ...


class BlockPool:
    """Cache blocks and the forest of cached prefixes.

    An edge of the forest is one block's tokens after a prefix; tokens are compared, not only hashed. A prefix
    is identified by a number that is never reused, or by its root. A block may be published with fewer tokens
    than its size; a look-up finds it only as the end of exactly those tokens. A freed block can be found
    until it is reused. Blocks that cannot be found are reused first, then the oldest."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        resource_count: ResourceCount | None = None,
        states: StatePool | None = None,
    ) -> None:
        """Create an empty pool. `resource_count` counts the blocks with references. `states` has the slots of
        a model that keeps a state in addition to the blocks."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.resource_count = resource_count or ResourceCount()
        self.states = states
        self._num_references = [0] * num_blocks
        # The front is reused first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._edges: dict[int, Edge] = {}  # by block
        self._children: dict[Edge, tuple[int, int]] = {}  # edge -> (prefix, block)
        self._names = count(1)
        self.listener: PoolListener | None = None

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for that many tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, root: Hashable, token_ids: Sequence[int]) -> tuple[list[int], Hashable]:
        """Return the blocks of the longest cached prefix of `token_ids` under `root`, and that prefix. This
        takes no references."""
        blocks: list[int] = []
        prefix: Hashable = root
        for start in range(0, len(token_ids), self.block_size):
            child = self._children.get((prefix, tuple(token_ids[start : start + self.block_size])))
            if child is None:
                break
            prefix, block = child
            blocks.append(block)
        return blocks, prefix

    def prefix_before(self, block: int) -> Hashable:
        """Return the prefix before a published block."""
        prefix, _ = self._edges[block]
        return prefix

    def allocate(self, cached: list[int], num_new: int) -> list[int] | None:
        """Take references to cached and fresh blocks. Return None and change nothing if they do not fit."""
        num_revived = sum(not self._num_references[block] for block in cached)
        if num_new > self.num_free - num_revived:
            return None
        self.resource_count.created += num_revived + num_new
        for block in cached:
            self._num_references[block] += 1
            self._free.pop(block, None)
        return cached + [self._take_oldest() for _ in range(num_new)]

    def publish(self, prefix: Hashable, tokens: Sequence[int], block: int) -> Hashable:
        """Publish a computed block, which must not be written again, and return the longer prefix. If another
        block already holds the same tokens after the prefix, look-ups continue to find that one."""
        edge = (prefix, tuple(tokens))
        if edge not in self._children:
            name = next(self._names)
            self._children[edge] = (name, block)
            self._edges[block] = edge
            if self.listener is not None:
                self.listener.store(name, edge)
        return self._children[edge][0]

    def release(self, blocks: list[int]) -> None:
        """Release one reference to each block."""
        for block in reversed(blocks):  # the end of a prefix is least valuable, so it is reused first
            self._num_references[block] -= 1
            assert self._num_references[block] >= 0, f"block {block} was released too often"
            if not self._num_references[block]:
                self.resource_count.released += 1
                self._free[block] = None
                if block not in self._edges:  # no look-up can find it
                    self._free.move_to_end(block, last=False)

    def renew(self, num_blocks: int, block_size: int, num_states: int | None = None) -> "BlockPool":
        """Return an empty pool for restarted shards, with the same number of states unless another is given.
        This pool must not be used afterwards."""
        self.resource_count.released += self.num_used
        states = None if self.states is None else self.states.renew(num_states)
        pool = BlockPool(num_blocks, block_size, self.resource_count, states)
        pool.listener = self.listener
        if pool.listener is not None:
            pool.listener.clear()
        return pool

    def published(self) -> list[tuple[int, Edge]]:
        """Return all prefixes that can be found, with their edges."""
        return [(name, edge) for edge, (name, _) in self._children.items()]

    def forget(self) -> None:
        """Forget all prefixes, so that no look-up finds a block. References to blocks stay valid."""
        self._children.clear()
        self._edges.clear()
        if self.states is not None:
            self.states.forget_all()
        if self.listener is not None:
            self.listener.clear()

    def _take_oldest(self) -> int:
        block, _ = self._free.popitem(last=False)
        edge = self._edges.pop(block, None)
        if edge is not None:
            name, _ = self._children.pop(edge)
            if self.states is not None:
                self.states.forget(name)
            if self.listener is not None:
                self.listener.remove(name)
        self._num_references[block] = 1
        return block
