"""Checks the order in which sequences are admitted, over random arrivals: against a plain model of the rules,
and against the bounds that `docs/fairness.md` states."""

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.scheduler import Scheduler
from tgis.router.scheduling.step import Step
from tgis.router.scheduling.waiting_queue import QUANTUM, MustWait, WaitingQueue
from tgis.router.sequence import CacheSalt, Sequence, Siblings, Stopping

BLOCK_SIZE = 16


def tenant_of(sequence: Sequence) -> str:
    return sequence.cache_salt.tenant


class PlainQueue:
    """The rules, turn by turn and with lists only."""

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.returned: list[Sequence] = []
        self.turns: dict[int, str] = {}
        self.ring: list[str] = []
        self.used: Counter[str] = Counter()
        self.live: Counter[str] = Counter()
        self.has_competed = False

    @property
    def competes(self) -> bool:
        return bool(self.waiting or self.returned) and len(self.ring) > 1

    def settle(self) -> None:
        if self.has_competed and not self.competes:
            self.turns = {}
            self.used.clear()
            self.ring = [name for name in self.ring if self.live[name]]
        self.has_competed = self.competes

    def add(self, sequence: Sequence) -> None:
        if tenant_of(sequence) not in self.ring:
            self.ring.append(tenant_of(sequence))
        self.live[tenant_of(sequence)] += 1
        self.waiting.append(sequence)
        self.settle()

    def put_back(self, sequence: Sequence) -> None:
        self.returned.insert(0, sequence)
        self.settle()

    def next(self, must_wait: MustWait) -> Sequence | None:
        free = [each for each in self.returned if not must_wait(each)]
        if free:
            return free[0]
        free = [each for each in self.waiting if not must_wait(each)]
        if not free:
            return None
        priority = min(each.priority for each in free)
        free = [each for each in free if each.priority == priority]
        if not self.competes:
            return free[0]
        mine = [each for each in free if tenant_of(each) == self.turns.get(priority)]
        if mine:
            return mine[0]
        first = self.turn_to(free)
        self.turns[priority] = tenant_of(first)
        self.settle()
        return first

    def turn_to(self, free: list[Sequence]) -> Sequence:
        while True:
            name = self.ring[0]
            mine = [each for each in free if tenant_of(each) == name]
            if mine and self.used[name] < QUANTUM:
                return mine[0]
            del self.ring[0]
            self.used[name] = max(self.used[name] - QUANTUM, 0)
            if self.live[name] or self.used[name]:
                self.ring.append(name)

    def count(self, sequence: Sequence, num_tokens: int) -> None:
        if self.competes:
            self.used[tenant_of(sequence)] += num_tokens

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        if sequence in self.waiting:
            self.count(sequence, num_tokens)
            self.turns.pop(sequence.priority, None)
        self.remove(sequence)
        self.settle()

    def remove(self, sequence: Sequence) -> None:
        lists = [each for each in (self.returned, self.waiting) if sequence in each]
        for each in lists:
            each.remove(sequence)
        present = {(each.priority, tenant_of(each)) for each in self.waiting}
        self.turns = {key: name for key, name in self.turns.items() if (key, name) in present}

    def end(self, sequence: Sequence) -> None:
        name = tenant_of(sequence)
        self.remove(sequence)
        self.live[name] -= 1
        if not self.live[name] and not self.used[name] and name in self.ring:
            self.ring.remove(name)
        self.settle()


class CheckedQueue(WaitingQueue):
    """Queue whose answers must be those of the plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = PlainQueue()
        self.num_choices: Counter[str] = Counter()

    def check(self) -> None:
        assert self.is_contended == self.model.competes
        assert len(self) == len(self.model.waiting) + len(self.model.returned)

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        self.model.add(sequence)
        self.check()

    def put_back(self, sequence: Sequence) -> None:
        super().put_back(sequence)
        self.model.put_back(sequence)
        self.num_choices["returned"] += 1

    def next(self, must_wait: MustWait) -> Sequence | None:
        chosen = super().next(must_wait)
        assert chosen is self.model.next(must_wait)
        if self.is_contended and chosen is not None:
            self.num_choices[tenant_of(chosen)] += 1
            self.num_choices["held"] += any(must_wait(each) for each in self)
        return chosen

    def take(self, sequence: Sequence) -> None:
        num_to_compute = len(sequence.token_ids) - sequence.num_computed
        super().take(sequence)
        self.model.take(sequence, num_to_compute)
        self.check()

    def end(self, sequence: Sequence, is_waiting: bool) -> None:
        super().end(sequence, is_waiting)
        self.model.end(sequence)
        self.check()


@dataclass
class Service:
    """Scheduler whose steps are answered at once."""

    scheduler: Scheduler
    budget: int = 512
    num_tokens: Counter[str] = field(default_factory=Counter)
    """Computed tokens by the name in the request's id, which is no part of the queue's rules."""

    def step(self) -> Step | None:
        scheduler = self.scheduler
        step = scheduler.next_step(self.budget)
        if step is None:
            return None
        scheduler.apply_answer(step)
        for work in step.work:
            self.num_tokens[work.sequence.request_id] += work.end - work.start
            if work.samples:
                self.append(work.sequence)
        return step

    def append(self, sequence: Sequence) -> None:
        waiting = self.scheduler.waiting
        self.scheduler.append_token(sequence, 7)
        if isinstance(waiting, CheckedQueue):
            waiting.model.count(sequence, 1)
        if len(sequence.token_ids) == sequence.max_tokens:
            self.scheduler.finish(sequence)

    @property
    def num_live(self) -> int:
        return len(self.scheduler.waiting) + len(self.scheduler.running)


def open_service(num_blocks: int, num_rows: int, queue: WaitingQueue | None = None) -> Service:
    scheduler = Scheduler(BlockPool(num_blocks, BLOCK_SIZE), num_rows)
    if queue is not None:
        scheduler.waiting = queue
    return Service(scheduler)


def draw_call(r: random.Random, tenants: list[str], max_prompt: int) -> list[Sequence]:
    """Return the sequences of one call, siblings with one prompt."""
    size = r.choice([r.randint(1, 40), r.randint(1, max_prompt)])
    prompt, salt, siblings = [r.randrange(9)] * 17 + [r.randrange(99)] * size, r.choice(tenants), Siblings()
    priority = r.choice([0, 0, 0, -3, 5]) if r.random() < 0.3 else 0
    stopping = Stopping(r.randint(1, 40))
    return [
        Sequence(list(prompt), stopping, cache_salt=CacheSalt(salt), siblings=siblings, priority=priority)
        for _ in range(r.choice([1, 1, 1, 3]))
    ]


def run_workload(seed: int) -> Counter[str]:
    """Check a random workload with cancels, preemptions and losses of the shards. Return what it covered."""
    r, queue = random.Random(seed), CheckedQueue()
    num_blocks, max_prompt = r.choice([60, 600]), r.choice([60, 600])  # 60 blocks cause preemptions
    service = open_service(num_blocks, r.randint(1, 8), queue)
    service.budget = r.choice([64, 512])
    tenants = [str(number) for number in range(r.choice([1, 2, 3, 9]))]
    todo, live = 70, list[Sequence]()
    while todo or service.num_live:
        for _ in range(min(todo, r.choice([0, 0, 1, 2, 20]))):
            todo -= 1
            for sequence in draw_call(r, tenants, max_prompt):
                service.scheduler.add(sequence)
                live.append(sequence)
        service.step()
        assert {*queue} == {*queue.model.waiting, *queue.model.returned}
        if live and r.random() < 0.05:  # a client leaves
            sequence = live.pop(r.randrange(len(live)))
            if sequence in service.scheduler.running or sequence in {*queue}:
                service.scheduler.finish(sequence)
        if r.random() < 0.005:  # the shards are lost
            service.scheduler.reset(BlockPool(num_blocks, BLOCK_SIZE))
    assert not queue.is_contended
    assert not queue.model.ring
    return queue.num_choices


def test_sequences_are_admitted_in_the_order_of_the_plain_model() -> None:
    covered = sum((run_workload(seed) for seed in range(12)), Counter[str]())
    assert min(covered[name] for name in ("0", "1", "2", "8", "held", "returned")) > 10, covered


@pytest.mark.slow
def test_more_workloads_in_the_order_of_the_plain_model() -> None:
    for seed in range(12, 300):
        run_workload(seed)


def test_without_other_tenants_the_order_is_that_of_arrival() -> None:
    r, service = random.Random(0), open_service(600, 3)
    arrivals = [sequence for _ in range(40) for sequence in draw_call(r, ["a"], 60)[:1]]
    for sequence in arrivals:
        sequence.priority = 0
        service.scheduler.add(sequence)
    started = list[Sequence]()
    while service.num_live:
        if (step := service.step()) is not None:
            started += step.opened
    assert started == arrivals


def test_lower_values_of_priority_go_first() -> None:
    queue, values = WaitingQueue(), [3, 0, -2, 3, -(2**31), 0, 2**31 - 1]
    sequences = [Sequence([1], Stopping(1), priority=value) for value in values]
    for sequence in sequences:
        queue.add(sequence)
    order = list[int]()
    while (sequence := queue.next(lambda _: False)) is not None:
        queue.take(sequence)
        order.append(sequences.index(sequence))
    assert order == [4, 2, 1, 5, 0, 3, 6]


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


@pytest.mark.parametrize("lengths", [((40, 40), (40, 40)), ((1200, 5), (8, 60)), ((8, 60), (1200, 5))])
@pytest.mark.parametrize("has_tenants", [True, False])
def test_two_tenants_with_loads_of_ten_to_one(
    lengths: tuple[tuple[int, int], tuple[int, int]], has_tenants: bool
) -> None:
    """Both always wait: one with 160 requests, the other with 16. Long prompts and long outputs do not change
    the shares. Without tenants the shares follow the loads, or the lengths."""
    service, r = open_service(4000, 8), random.Random(1)
    loads = {"heavy": (160, *lengths[0]), "light": (16, *lengths[1])}

    def fill() -> None:
        present = Counter(
            each.request_id for each in (*service.scheduler.waiting, *service.scheduler.running)
        )
        for name, (count, max_prompt, max_new) in loads.items():
            for _ in range(count - present[name]):
                sequence = Sequence(
                    [r.randrange(10**6) for _ in range(r.randint(1, max_prompt))],
                    Stopping(r.randint(1, max_new)),
                    cache_salt=CacheSalt(name if has_tenants else ""),
                    request_id=name,
                )
                service.scheduler.add(sequence)

    for _ in range(600):
        fill()
        service.step()
    index = jain([float(service.num_tokens[name]) for name in loads])
    assert index >= 0.95 if has_tenants else index < 0.95


@pytest.mark.parametrize("has_tenants", [True, False])
def test_short_prompts_of_others_do_not_wait_for_a_long_one(has_tenants: bool) -> None:
    """Expect each within the next step, and half of every step for the long prompt. A tenant's own short
    prompts wait, as without tenants."""
    service = open_service(4000, 8)
    service.budget = 100
    long = Sequence(list(range(2000)), Stopping(1), cache_salt=CacheSalt("long"))
    service.scheduler.add(long)
    service.step()
    started, num_steps = list[bool](), 1
    while long in service.scheduler.running:
        short = Sequence(
            [10**4 + num_steps] * 20, Stopping(1), cache_salt=CacheSalt("x" if has_tenants else "long")
        )
        service.scheduler.add(short)
        step = service.step()
        assert step is not None
        started.append(short in step.opened)
        num_steps += 1
        computed = sum(work.end - work.start for work in step.work if work.sequence is long)
        assert computed >= 50 or long not in service.scheduler.running
    if has_tenants:
        assert all(started)
        assert num_steps == 1 + 1900 // 80 + 1
    else:
        assert not any(started[:-1])
        assert num_steps == 20


def test_long_prompts_are_computed_one_after_the_other() -> None:
    service = open_service(4000, 8)
    service.budget = 100
    prompts = [list(range(size)) for size in (1000, 51, 50)]
    first, long, short = (
        Sequence(prompt, Stopping(1), cache_salt=CacheSalt(name))
        for name, prompt in zip("abc", prompts, strict=True)
    )
    service.scheduler.add(first)
    service.step()
    service.scheduler.add(long)
    service.step()
    service.scheduler.add(short)
    started = list[Sequence]()
    while first in service.scheduler.running:
        step = service.step()
        assert step is not None
        started += step.opened
    assert started in ([], [long], [long, short]), "the turn of the long prompt is not skipped"
    assert not started or step.opened == started, "both start when the first is finished"


class Grants:
    """Tokens counted for each tenant, and the bound for those that start while a sequence waits."""

    def __init__(self, queue: CheckedQueue, max_prompt: int) -> None:
        self.queue, self.max_prompt = queue, max_prompt
        self.totals: Counter[str] = Counter()
        self.at_start: Counter[str] = Counter()
        """Total of each tenant when it was chosen to start its newest sequence, and that one's prompt."""
        self.at_choice: dict[str, int] = {}
        self.before: dict[Sequence, tuple[int, dict[str, int]]] = {}
        """The excess of its tenant, and the totals of all tenants in the ring, when a sequence arrived."""

    def watch(self, sequence: Sequence) -> None:
        model = self.queue.model
        rivals = {name: self.totals[name] for name in model.ring}
        self.before[sequence] = model.used[tenant_of(sequence)], rivals

    def check(self, sequence: Sequence) -> None:
        own, (excess, before) = tenant_of(sequence), self.before.pop(sequence)
        num_turns = (excess + self.totals[own] - before.pop(own)) // QUANTUM + 1
        for name, total in before.items():
            assert self.at_start[name] - total < num_turns * QUANTUM + self.max_prompt

    def choose(self, sequence: Sequence) -> None:
        """Note the tenant's total when its turn comes. It keeps the turn while the sequence does not fit."""
        self.at_choice.setdefault(tenant_of(sequence), self.totals[tenant_of(sequence)])

    def start(self, sequence: Sequence) -> None:
        self.check(sequence)
        name, num_tokens = tenant_of(sequence), len(sequence.token_ids) * self.queue.is_contended
        self.totals[name] += num_tokens
        self.at_start[name] = self.at_choice.pop(name) + num_tokens


def simulate(r: random.Random, num_arrivals: int, num_tenants: int, max_prompt: int) -> tuple[int, int]:
    """Check the bound for every arrival, in a service whose running sequences end at random. Return the
    number of arrivals while several tenants competed, and the maximum length of the queue."""
    queue, names = CheckedQueue(), [str(number) for number in range(num_tenants)]
    weights, grants = [r.choice([1, 1, 10]) for _ in names], Grants(queue, max_prompt)
    running, num_contended, longest = deque[Sequence](), 0, 0
    while num_arrivals or queue or running:
        num_new = r.choice([0, 1, 2, 6]) if len(queue) < 25 else 0
        for _ in range(min(num_arrivals, num_new)):
            num_arrivals -= 1
            size = r.choice([1, r.randint(1, 40), r.randint(1, max_prompt)])
            sequence = Sequence([0] * size, Stopping(1), cache_salt=CacheSalt(r.choices(names, weights)[0]))
            queue.add(sequence)
            grants.watch(sequence)
            num_contended += queue.is_contended
        longest = max(longest, len(queue))
        for _ in range(len(running)):  # each running sequence gets a token or ends
            sequence = running.popleft()
            if r.random() < 0.2:
                queue.end(sequence, is_waiting=False)
            else:
                running.append(sequence)
                if queue.is_contended:
                    queue.count_tokens(sequence, 1)
                    queue.model.count(sequence, 1)
                    grants.totals[tenant_of(sequence)] += 1
        while len(running) < 6 and (chosen := queue.next(lambda _: False)) is not None:
            grants.choose(chosen)
            if r.random() < 0.2:  # there are too few blocks
                break
            grants.start(chosen)
            queue.take(chosen)
            running.append(chosen)
    return num_contended, longest


@pytest.mark.parametrize(
    "num_arrivals", [800, pytest.param(500_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
@pytest.mark.parametrize(("num_tenants", "max_prompt"), [(2, 40), (2, 3000), (7, 700), (40, 3000)])
def test_no_sequence_waits_longer_than_the_bound(
    num_tenants: int, max_prompt: int, num_arrivals: int
) -> None:
    r = random.Random(num_tenants)
    num_contended, longest = simulate(r, num_arrivals, num_tenants, max_prompt)
    assert num_contended > num_arrivals / 2
    assert longest > 25
