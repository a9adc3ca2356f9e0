"""Cache blocks: which are free, which are shared, which prefix each full one holds. Exact, and without
tensors."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import count

from tgis.router.metrics.resource_counts import Tally


class BlockPool:
    """Cached prefixes form a forest. An edge is one block's tokens below a prefix, compared and not only
    hashed; a prefix is named by a number that is never reused, or by its root. A block may be published
    with fewer tokens than it has room for, and is found as the end of exactly those. A freed block can be
    found until it is reused, oldest first."""

    def __init__(self, num_blocks: int, block_size: int, tally: Tally | None = None) -> None:
        """A block counts as taken while somebody refers to it, however many do; one that can only be found
        counts as given back."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tally = tally or Tally()
        self._num_references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(
            range(num_blocks)
        )  # the front is reused first
        self._edges: dict[
            int, tuple[Hashable, tuple[int, ...]]
        ] = {}  # block -> (prefix before it, its tokens)
        self._children: dict[
            tuple[Hashable, tuple[int, ...]], tuple[int, int]
        ] = {}  # edge -> (prefix, block)
        self._names = count(1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, root: Hashable, token_ids: Sequence[int]) -> tuple[list[int], Hashable]:
        """The blocks of the longest cached prefix of `token_ids` under `root`, and that prefix. Takes no
        reference."""
        blocks: list[int] = []
        prefix: Hashable = root
        for start in range(0, len(token_ids), self.block_size):
            child = self._children.get((prefix, tuple(token_ids[start : start + self.block_size])))
            if child is None:
                break
            prefix, block = child
            blocks.append(block)
        return blocks, prefix

    def allocate(self, cached: list[int], num_new: int) -> list[int] | None:
        """References to the `cached` blocks, then `num_new` fresh ones; None, and no change, when they do not
        fit."""
        num_revived = sum(not self._num_references[block] for block in cached)
        if num_new > self.num_free - num_revived:
            return None
        self.tally.created += num_revived + num_new
        for block in cached:
            self._num_references[block] += 1
            self._free.pop(block, None)
        return cached + [self._take_oldest() for _ in range(num_new)]

    def publish(self, prefix: Hashable, tokens: Sequence[int], block: int) -> Hashable:
        """Makes a computed block, which nobody writes to any more, findable below `prefix`; returns the
        longer prefix.

        Where another block holds the same tokens already, that one stays the one that is found."""
        edge = (prefix, tuple(tokens))
        if edge not in self._children:
            self._children[edge] = (next(self._names), block)
            self._edges[block] = edge
        return self._children[edge][0]

    def release(self, blocks: list[int]) -> None:
        """Gives up one reference to each block."""
        for block in reversed(blocks):  # the end of a prefix is worth least, so it is reused first
            self._num_references[block] -= 1
            assert self._num_references[block] >= 0, f"block {block} was released too often"
            if not self._num_references[block]:
                self.tally.released += 1
                self._free[block] = None

    def renew(self, num_blocks: int, block_size: int) -> "BlockPool":
        """An empty one, for shards that have lost what this one's blocks held; nobody may refer to them."""
        self.tally.released += self.num_used
        return BlockPool(num_blocks, block_size, self.tally)

    def _take_oldest(self) -> int:
        block, _ = self._free.popitem(last=False)
        edge = self._edges.pop(block, None)
        if edge is not None:
            del self._children[edge]
        self._num_references[block] = 1
        return block
