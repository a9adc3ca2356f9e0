"""The queue against a plain model of its rules."""

import random

import pytest

from tgis.process.fair_queue import FairQueue

MAX_BYTES = 20


class PlainQueue:
    """Model with a list of (owner, item, size), and the owners in the order of service."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, int, int]] = []
        self.turns: list[str] = []

    def held(self, owner: str) -> int:
        return sum(size for each, _, size in self.entries if each == owner)

    def push(self, owner: str, item: int, size: int) -> list[int]:
        self.entries.append((owner, item, size))
        if owner not in self.turns:
            self.turns.append(owner)
        dropped = []
        while sum(size for _, _, size in self.entries) > MAX_BYTES:
            largest = max(map(self.held, self.turns))
            loser = (
                owner
                if self.held(owner) == largest
                else next(o for o in self.turns if self.held(o) == largest)
            )
            entry = [entry for entry in self.entries if entry[0] == loser][-1]
            dropped.append(entry[1])
            self._forget(entry)
        return dropped

    def pop(self) -> int:
        owner = self.turns[0]
        entry = next(entry for entry in self.entries if entry[0] == owner)
        self.turns = [*self.turns[1:], owner]
        self._forget(entry)
        return entry[1]

    def remove(self, owner: str, item: int) -> bool:
        entries = [entry for entry in self.entries if entry[:2] == (owner, item)]
        for entry in entries:
            self._forget(entry)
        return bool(entries)

    def _forget(self, entry: tuple[str, int, int]) -> None:
        self.entries.remove(entry)
        if not self.held(entry[0]) and not any(each[0] == entry[0] for each in self.entries):
            self.turns.remove(entry[0])


@pytest.mark.parametrize("seed", range(40))
def test_against_the_plain_model(seed: int) -> None:
    r = random.Random(seed)
    queue: FairQueue[int] = FairQueue(MAX_BYTES)
    plain = PlainQueue()
    for item in range(300):
        action, owner = r.random(), r.choice("abcd")
        if action < 0.55:
            size = r.randint(1, 25 if r.random() < 0.1 else 6)
            assert queue.push(owner, item, size) == plain.push(owner, item, size)
        elif action < 0.85 and plain.entries:
            assert queue.pop() == plain.pop()
        else:
            known = r.choice(plain.entries)[:2] if plain.entries and r.random() < 0.7 else (owner, item)
            assert queue.remove(*known) == plain.remove(*known)
        assert len(queue) == len(plain.entries)
        assert queue.num_bytes == sum(size for _, _, size in plain.entries) <= MAX_BYTES
    while plain.entries:
        assert queue.pop() == plain.pop()
    with pytest.raises(IndexError):
        queue.pop()


def test_an_owner_of_many_items_delays_others_by_one_item() -> None:
    queue: FairQueue[str] = FairQueue(100)
    for number in range(9):
        queue.push("many", f"many {number}", 10)
    queue.push("one", "one", 10)
    assert [queue.pop() for _ in range(3)] == ["many 0", "one", "many 1"]


def test_a_full_queue_drops_the_newest_item_of_its_largest_owner() -> None:
    queue: FairQueue[str] = FairQueue(100)
    for number in range(10):
        assert queue.push("many", f"many {number}", 10) == []
    assert queue.push("many", "many 10", 10) == ["many 10"]
    assert queue.push("one", "one", 15) == ["many 9", "many 8"]
    assert queue.push("two", "too large", 101) == ["too large"]
    assert queue.num_bytes == 95
