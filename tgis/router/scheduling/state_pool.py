"""Slots for states, for models that keep a state in addition to keys and values, such as Mamba's."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Protocol

from tgis.router.metrics.resource_counts import ResourceCount
from tgis.router.sequence import Sequence

MIN_INTERVAL_BLOCKS = 16
FULL_LENGTHS = 4  # number of sequences of maximum length whose snapshots fit into the slots


class SnapshotListener(Protocol):
    """Listener to the changes of the snapshots."""

    def store_snapshot(self, prefix: Hashable) -> None:
        """Record that there is a snapshot of the state after a prefix."""

    def remove_snapshot(self, prefix: Hashable) -> None: ...


class StatePool:
    """Slots of the shards' states. Every running sequence has one. The other slots may hold snapshots: copies
    of states after all tokens of a cached prefix, from which sequences with the same prefix continue.

    The shards copy states in the order in which steps are planned. A slot may therefore be reused as soon as
    the step that reads it is planned. If no slot is free, the oldest snapshot is dropped."""

    def __init__(self, num_slots: int, interval: int, resource_count: ResourceCount | None = None) -> None:
        """Create an empty pool. Snapshots are taken every `interval` tokens and at the end of the last full
        block of a prompt. `resource_count` counts the slots of sequences and of unfinished snapshots."""
        self.num_slots = num_slots
        self.resource_count = resource_count or ResourceCount()
        self._interval = interval
        self._free = list(range(num_slots))[::-1]
        self._snapshots: OrderedDict[Hashable, int] = OrderedDict()  # by prefix, the oldest first
        self.listener: SnapshotListener | None = None

    def __contains__(self, prefix: Hashable) -> bool:
        return prefix in self._snapshots

    @property
    def num_available(self) -> int:
        """Number of slots that `take` can return."""
        return len(self._free) + len(self._snapshots)

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def num_used(self) -> int:
        """Number of slots of sequences and of unfinished snapshots."""
        return self.num_slots - self.num_available

    def take(self) -> int | None:
        """Take a slot. Return None if there is none."""
        if self._free:
            slot = self._free.pop()
        elif self._snapshots:
            slot = self._drop(next(iter(self._snapshots)))
        else:
            return None
        self.resource_count.created += 1
        return slot

    def release(self, slot: int) -> None:
        self.resource_count.released += 1
        self._free.append(slot)

    def publish(self, prefix: Hashable, slot: int) -> None:
        """Release a slot that holds the state after a prefix, such that look-ups find it."""
        if prefix in self._snapshots:
            self.release(slot)
        else:
            self.resource_count.released += 1
            self._snapshots[prefix] = slot
            if self.listener is not None:
                self.listener.store_snapshot(prefix)

    def published(self) -> list[Hashable]:
        """Return the prefixes with a snapshot."""
        return list(self._snapshots)

    def find(self, prefix: Hashable) -> int:
        """Return the slot with the state after a prefix in the pool. The snapshot becomes the newest."""
        self._snapshots.move_to_end(prefix)
        return self._snapshots[prefix]

    def forget(self, prefix: Hashable) -> None:
        """Drop the snapshot of a prefix that no look-up can find any more, if there is one."""
        if prefix in self._snapshots:
            self._free.append(self._drop(prefix))

    def forget_all(self) -> None:
        """Drop all snapshots. The listener to the blocks learns that all of them are gone."""
        self._free += self._snapshots.values()
        self._snapshots.clear()

    def renew(self, num_slots: int | None = None) -> "StatePool":
        """Return an empty pool for restarted shards. This pool must not be used afterwards."""
        self.resource_count.released += self.num_used
        states = StatePool(num_slots or self.num_slots, self._interval, self.resource_count)
        states.listener = self.listener
        return states

    def _drop(self, prefix: Hashable) -> int:
        """Drop a snapshot and return its slot."""
        slot = self._snapshots.pop(prefix)
        if self.listener is not None:
            self.listener.remove_snapshot(prefix)
        return slot

    def cut(self, sequence: Sequence, end: int, block_size: int) -> int:
        """Return where work on a sequence must end that is planned to end at `end`: there, or at the first
        position of a snapshot."""
        start = sequence.num_scheduled
        end = min(end, (start // self._interval + 1) * self._interval)
        last = _last_block_end(sequence, block_size)
        return min(end, last) if last > start else end

    def takes_snapshot(self, sequence: Sequence, end: int, block_size: int) -> bool:
        """Return True if there should be a snapshot of a sequence after `end` tokens."""
        return end > 0 and (end % self._interval == 0 or end == _last_block_end(sequence, block_size))


def choose_interval(num_slots: int, max_sequence_length: int, block_size: int) -> int:
    """Return the number of tokens between snapshots: few enough for short ways, but so many that the
    snapshots of some long sequences fit into the slots."""
    num_tokens = FULL_LENGTHS * max_sequence_length / num_slots
    return max(MIN_INTERVAL_BLOCKS, -(-int(num_tokens) // block_size)) * block_size


def _last_block_end(sequence: Sequence, block_size: int) -> int:
    """Return the end of the last full block of a prompt that another sequence with this prompt can use."""
    return (sequence.prompt_len - 1) // block_size * block_size
