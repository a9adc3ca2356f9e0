"""Check reservation of whole lengths against a plain model of the rule, and the cache hits between
requests."""

import random
from collections import deque
from typing import NamedTuple

import pytest

from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.scheduler import Scheduler
from tgis.router.sequence import Sequence, Siblings, Stopping

WORKLOADS = 60


class Wish(NamedTuple):
    """A request in the model: numbers of tokens, and the step before which it arrives."""

    prompt_len: int
    max_new_tokens: int
    num_generated: int
    arrival: int


class Ledger:
    """A model of the rule: the next request starts once its whole length fits beside the running ones."""

    def __init__(self, wishes: list[Wish], num_blocks: int, block_size: int, num_rows: int) -> None:
        self.wishes, self.num_rows = wishes, num_rows
        self.waiting, self.left = deque(range(len(wishes))), [wish.num_generated for wish in wishes]
        lengths = [wish.prompt_len + wish.max_new_tokens - 1 for wish in wishes]
        self.price = [(length + block_size - 1) // block_size for length in lengths]
        self.purse = num_blocks
        self.running: list[int] = []

    def step(self, number: int) -> set[int]:
        """Return the requests that step `number` computes."""
        while self.waiting and self.wishes[self.waiting[0]].arrival <= number:
            if len(self.running) == self.num_rows or self.price[self.waiting[0]] > self.purse:
                break
            self.running.append(self.waiting.popleft())
            self.purse -= self.price[self.running[-1]]
        computed = set(self.running)
        for one in computed:
            self.left[one] -= 1
            if not self.left[one]:
                self.running.remove(one)
                self.purse += self.price[one]
        return computed


def draw_wishes(r: random.Random, max_tokens: int) -> list[Wish]:
    wishes, arrival = [], 0
    for _ in range(r.randint(1, 30)):
        prompt_len = r.randint(1, max_tokens - 1)
        max_new = r.randint(1, max_tokens - prompt_len)
        arrival += r.choice([0, 0, 1, 5])
        wishes.append(Wish(prompt_len, max_new, r.randint(1, max_new), arrival))
    return wishes


@pytest.mark.parametrize("seed", range(WORKLOADS))
def test_a_request_that_fits_whole_starts_and_stays(seed: int) -> None:
    r = random.Random(seed)
    num_blocks, block_size, num_rows = r.randint(2, 30), r.choice([1, 3, 8]), r.randint(1, 6)
    wishes = draw_wishes(r, num_blocks * block_size)
    ledger = Ledger(wishes, num_blocks, block_size, num_rows)
    scheduler = Scheduler(BlockPool(num_blocks, block_size), num_rows, reserves_output=True)
    # The first token differs, so that requests share no blocks.
    sequences = [
        Sequence([number] * wish.prompt_len, Stopping(max_new_tokens=wish.max_new_tokens))
        for number, wish in enumerate(wishes)
    ]
    number, num_added = 0, 0
    while ledger.waiting or ledger.running:
        while num_added < len(wishes) and wishes[num_added].arrival <= number:
            scheduler.add(sequences[num_added])
            num_added += 1
        expected, step = ledger.step(number), scheduler.next_step(10_000)
        work = step.work if step is not None else []
        assert {sequences.index(item.sequence) for item in work} == expected
        if step is not None:
            scheduler.apply_answer(step)
        for item in work:
            sequence = item.sequence
            scheduler.append_token(sequence, 1000)
            if sequence.num_generated == wishes[sequences.index(sequence)].num_generated:
                scheduler.finish(sequence)
        number += 1
        assert number < 20_000, "no progress"
    assert scheduler.num_preemptions == 0
    assert scheduler.pool.num_used == 0


def test_shared_blocks_are_reserved_once() -> None:
    """Check two siblings with 8 blocks: they share 3 of the prompt and have 2 each of their own."""
    siblings = Siblings()
    first, second = (
        Sequence(list(range(13)), Stopping(max_new_tokens=8), siblings=siblings) for _ in range(2)
    )
    scheduler = Scheduler(BlockPool(8, 4), max_sequences=4, reserves_output=True)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(2):
        step = scheduler.next_step(100)
        assert step is not None
        scheduler.apply_answer(step)
        for item in step.work:
            scheduler.append_token(item.sequence, 5)
    assert [*scheduler.running] == [first, second]
    assert scheduler.pool.num_used == 7
    assert first.block_table[:3] == second.block_table[:3]


def test_unused_reserved_blocks_evict_no_cached_prefix() -> None:
    """Check requests that end early: their unwritten blocks are reused first."""
    scheduler = Scheduler(BlockPool(20, 4), max_sequences=4, reserves_output=True)
    prompt = list(range(9))
    for number in range(6):
        prompted = prompt if number in (0, 5) else [100 + number] * 3
        sequence = Sequence(list(prompted), Stopping(max_new_tokens=30))
        scheduler.add(sequence)
        step = scheduler.next_step(100)
        assert step is not None
        assert step.work[0].start == (8 if number == 5 else 0)
        scheduler.apply_answer(step)
        scheduler.append_token(sequence, 5)
        scheduler.finish(sequence)
