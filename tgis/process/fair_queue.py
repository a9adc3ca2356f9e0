"""Implements a queue that serves its owners in turn and is bounded in bytes."""

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Share(Generic[T]):
    """Items of one owner in the queue, oldest first."""

    items: deque[tuple[T, int]] = field(default_factory=deque)
    num_bytes: int = 0


class FairQueue(Generic[T]):
    """Queue that serves its owners round-robin, and the items of one owner in order of arrival.

    A full queue drops the newest items of the owner with the most bytes: longest queue drop (Suter et al.,
    "Design considerations for supporting TCP with per-flow queueing", 1998)."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._shares: OrderedDict[Hashable, _Share[T]] = OrderedDict()  # in order of service

    def __len__(self) -> int:
        return sum(len(share.items) for share in self._shares.values())

    def push(self, owner: Hashable, item: T, num_bytes: int) -> list[T]:
        """Append an item, and return the items that are dropped to make room; `item` may be one of them."""
        share = self._shares.setdefault(owner, _Share())
        share.items.append((item, num_bytes))
        share.num_bytes += num_bytes
        self.num_bytes += num_bytes
        dropped = []
        while self.num_bytes > self._max_bytes:
            # Among owners with equally many bytes, the owner of the new item loses.
            loser = max(self._shares, key=lambda each: (self._shares[each].num_bytes, each == owner))
            newest, size = self._shares[loser].items.pop()
            self._forget(loser, size)
            dropped.append(newest)
        return dropped

    def pop(self) -> T:
        """Remove and return the oldest item of the next owner. Raises IndexError if the queue is empty."""
        if not self._shares:
            raise IndexError("pop from an empty queue")
        owner, share = next(iter(self._shares.items()))
        item, size = share.items.popleft()
        self._shares.move_to_end(owner)
        self._forget(owner, size)
        return item

    def remove(self, owner: Hashable, item: T) -> bool:
        """Remove an item, and return whether it was still in the queue."""
        share = self._shares.get(owner)
        entry = next((each for each in share.items if each[0] is item), None) if share else None
        if share is None or entry is None:
            return False
        share.items.remove(entry)
        self._forget(owner, entry[1])
        return True

    def _forget(self, owner: Hashable, num_bytes: int) -> None:
        """Subtract the bytes of a removed item."""
        share = self._shares[owner]
        share.num_bytes -= num_bytes
        self.num_bytes -= num_bytes
        if not share.items:
            del self._shares[owner]
