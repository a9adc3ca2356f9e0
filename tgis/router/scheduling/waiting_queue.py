"""Queue of the sequences that wait for a row. Decides which one is admitted next: by priority, in turns
between tenants, and in order of arrival within a tenant.

The turns are a deficit round robin over tokens (Shreedhar and Varghese 1996). A sequence's number of tokens
is unknown before its end, so a tenant may exceed its turn, and its next turns are shorter until the excess is
repaid."""

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tgis.router.sequence import Sequence

QUANTUM = 256
"""Tokens of one turn: prompt tokens to compute of admitted sequences, and generated tokens."""

MustWait = Callable[[Sequence], bool]
Lane = dict[str, deque[Sequence]]
"""Waiting sequences of one priority, by tenant."""


@dataclass(slots=True)
class _Tenant:
    num_live: int = 0
    """Number of its waiting and running sequences."""
    num_used: int = 0
    """Tokens used in its current turn, and in excess of its earlier turns."""


class WaitingQueue:
    """Order of the waiting sequences. First are those that were put back. Next are those with the lowest
    priority value. Among them, the first tenant of the ring with a sequence and less than a quantum used is
    served. A tenant before it ends its turn: it moves to the end of the ring, and a quantum is repaid.

    Tokens are counted only while the sequences of several tenants compete, so that nobody pays for capacity
    that no other tenant wanted."""

    def __init__(self) -> None:
        self._returned: deque[Sequence] = deque()
        self._priorities: list[int] = []
        self._lanes: dict[int, Lane] = {}
        self._chosen: dict[int, str] = {}
        """Tenant whose turn it is, by priority. That does not change until its sequence fits, so that none
        starves."""
        self._ring: OrderedDict[str, _Tenant] = OrderedDict()
        self._num_waiting = 0
        self.is_contended = False
        """True while a sequence waits and several tenants have sequences or excess."""

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._returned
        for priority in self._priorities:
            for queue in self._lanes[priority].values():
                yield from queue

    @property
    def num_tenants(self) -> int:
        """Number of tenants with waiting sequences."""
        return len({sequence.cache_salt.tenant for sequence in self})

    def add(self, sequence: Sequence) -> None:
        """Append a new sequence to those of its tenant and priority."""
        name = sequence.cache_salt.tenant
        tenant = self._ring.get(name)
        if tenant is None:
            tenant = self._ring[name] = _Tenant()
        tenant.num_live += 1
        lane = self._lanes.get(sequence.priority)
        if lane is None:
            lane = self._lanes[sequence.priority] = {}
            insort(self._priorities, sequence.priority)
        queue = lane.get(name)
        if queue is None:
            lane[name] = deque((sequence,))
        else:
            queue.append(sequence)
        self._count(1)

    def put_back(self, sequence: Sequence) -> None:
        """Put an admitted sequence before all others. Its next admission costs its tenant nothing."""
        self._returned.appendleft(sequence)
        self._count(1)

    def next(self, must_wait: MustWait) -> Sequence | None:
        """Return the sequence to admit next, or None. A sequence for which `must_wait` is true is skipped and
        keeps its place."""
        for sequence in self._returned:
            if not must_wait(sequence):
                return sequence
        for priority in self._priorities:
            if (chosen := self._choose(priority, must_wait)) is not None:
                return chosen
        return None

    def take(self, sequence: Sequence) -> None:
        """Remove a sequence at its admission, with its blocks taken, and count the tokens to compute."""
        if self.is_contended and sequence not in self._returned:
            self._chosen.pop(sequence.priority, None)
            self.count_tokens(sequence, sequence.num_pending + sequence.num_to_encode)
        self._remove(sequence)

    def count_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        """Count tokens that a sequence's tenant uses, while the queue is contended."""
        self._ring[sequence.cache_salt.tenant].num_used += num_tokens

    def end(self, sequence: Sequence, is_waiting: bool) -> None:
        """Forget an ended sequence."""
        if is_waiting:
            self._remove(sequence)
        name = sequence.cache_salt.tenant
        tenant = self._ring[name]
        tenant.num_live -= 1
        if not tenant.num_live and not tenant.num_used:
            del self._ring[name]
        self._count(0)

    def _choose(self, priority: int, must_wait: MustWait) -> Sequence | None:
        lane = self._lanes[priority]
        if not self.is_contended:
            [queue] = lane.values()
            return _first(queue, must_wait)
        chosen = self._chosen.get(priority)
        if chosen is not None and (first := _first(lane[chosen], must_wait)) is not None:
            return first
        if all(_first(queue, must_wait) is None for queue in lane.values()):
            return None
        first = self._next_in_turn(lane, must_wait)
        self._chosen[priority] = first.cache_salt.tenant
        self._count(0)
        return first

    def _next_in_turn(self, lane: Lane, must_wait: MustWait) -> Sequence:
        """Return the first sequence of the tenant whose turn it is. At least one sequence need not wait."""
        while True:
            least = None
            for _ in range(len(self._ring)):
                name = next(iter(self._ring))
                first = _first(lane.get(name, ()), must_wait)
                num_used = self._ring[name].num_used
                if first is not None and num_used < QUANTUM:
                    return first
                self._end_turn(name)
                if first is not None:
                    num_used -= QUANTUM
                    least = num_used if least is None else min(least, num_used)
            assert least is not None, "at least one sequence need not wait"
            self._repay(least // QUANTUM * QUANTUM)  # at once, because the next rounds would only repay

    def _end_turn(self, name: str) -> None:
        tenant = self._ring[name]
        tenant.num_used = max(tenant.num_used - QUANTUM, 0)
        if tenant.num_live or tenant.num_used:
            self._ring.move_to_end(name)
        else:
            del self._ring[name]

    def _repay(self, num_tokens: int) -> None:
        """Repay tokens of every tenant, and forget ended tenants without excess."""
        for name, tenant in list(self._ring.items()):
            tenant.num_used = max(tenant.num_used - num_tokens, 0)
            if not tenant.num_live and not tenant.num_used:
                del self._ring[name]

    def _remove(self, sequence: Sequence) -> None:
        if self._returned and sequence in self._returned:
            self._returned.remove(sequence)
        else:
            priority = sequence.priority
            name = sequence.cache_salt.tenant
            lane = self._lanes[priority]
            lane[name].remove(sequence)
            if not lane[name]:
                del lane[name]
                if self._chosen.get(priority) == name:
                    del self._chosen[priority]
            if not lane:
                del self._lanes[priority]
                self._priorities.remove(priority)
        self._count(-1)

    def _count(self, added: int) -> None:
        """Change the number of waiting sequences. At the end of a contention, all excess is forgotten."""
        self._num_waiting += added
        is_contended = self._num_waiting > 0 and len(self._ring) > 1
        if self.is_contended and not is_contended:
            self._chosen.clear()
            self._repay(max((tenant.num_used for tenant in self._ring.values()), default=0))
        self.is_contended = is_contended


def _first(queue: deque[Sequence] | tuple[()], must_wait: MustWait) -> Sequence | None:
    for sequence in queue:
        if not must_wait(sequence):
            return sequence
    return None
