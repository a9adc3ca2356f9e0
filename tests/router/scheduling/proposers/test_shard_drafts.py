"""Check when the shards' drafts are used, with simulated steps of known cost and acceptance."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from tgis.router.scheduling.proposers.shard_drafts import MAX_PAUSE, ShardDrafts
from tgis.router.scheduling.step import DraftResult, Step, WorkItem
from tgis.router.scheduling.token_budget import TokenBudget
from tgis.router.sequence import Sequence as Generation
from tgis.router.sequence import Stopping

MAX_DRAFTS = 3
FIXED_S, ROW_S = 0.010, 0.0002  # of a step without drafts
IDLE = 0.15  # share of a step for which the shards wait while all sequences have drafts

Rate = Callable[[Generation], float]


def new_sequences(count: int) -> list[Generation]:
    return [Generation([1], Stopping(max_new_tokens=10_000)) for _ in range(count)]


@dataclass
class Service:
    """Shards that compute one step after the other, and count the tokens of each sequence."""

    sequences: Sequence[Generation]
    draft_s: float
    heads_s: float = 0.0
    """Cost of a step with drafts."""
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.budget = TokenBudget(1000, 1.0)
        self.budget.observe(100, FIXED_S + 100 * ROW_S)
        self.proposer = ShardDrafts(MAX_DRAFTS, self.budget.predict)
        self.seconds = 0.0
        self.num_tokens: dict[Generation, int] = dict.fromkeys(self.sequences, 0)
        self.num_drafts: dict[Generation, int] = dict.fromkeys(self.sequences, 0)

    def run(self, num_steps: int, rate: Rate, max_drafts: int = 1000) -> "Service":
        for _ in range(num_steps):
            self.step(rate, max_drafts)
        return self

    def step(self, rate: Rate, max_drafts: int) -> None:
        is_drafting = self.proposer.begin(len(self.sequences), max_drafts)
        results = []
        for sequence in self.sequences:
            allowed = self.proposer.propose(sequence, MAX_DRAFTS).max_proposed if is_drafting else 0
            accepted = 0
            while accepted < allowed and self.rng.random() < rate(sequence):
                accepted += 1
            if allowed:
                results.append(DraftResult(sequence, allowed, accepted))
            self.num_tokens[sequence] += 1 + accepted
            self.num_drafts[sequence] += allowed
        self.answer(results)

    def answer(self, results: list[DraftResult]) -> None:
        count = len(self.sequences)
        num_drafts = sum(result.num_drafts for result in results)
        work = [WorkItem(sequence, 0, 0, 1, True, False, ()) for sequence in self.sequences]
        seconds = FIXED_S + count * ROW_S + num_drafts * self.draft_s + bool(results) * self.heads_s
        self.seconds += seconds * (1 + IDLE * bool(results))
        step = Step(0, work, count, 0, num_drafts, 0, False, [])
        if not results:
            self.budget.observe(count, seconds)
        self.proposer.observe(step, results, seconds)

    @property
    def speed(self) -> float:
        """Tokens per second, relative to those without drafts."""
        plain = len(self.sequences) / (FIXED_S + len(self.sequences) * ROW_S)
        return sum(self.num_tokens.values()) / self.seconds / plain


@pytest.mark.parametrize("count", [1, 32])
def test_right_drafts_are_used_and_pay(count: int) -> None:
    service = Service(new_sequences(count), draft_s=0.0001).run(400, lambda _: 0.9)
    assert service.speed > (2.2 if count == 1 else 1.3)
    assert sum(service.num_drafts.values()) > 350 * count * MAX_DRAFTS * 0.9


@pytest.mark.parametrize("count", [1, 8, 32])
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("heads_s", [0.0, 0.01])
def test_wrong_drafts_cost_little(count: int, rate: float, heads_s: float) -> None:
    service = Service(new_sequences(count), draft_s=0.0005, heads_s=heads_s).run(1000, lambda _: rate)
    assert service.speed > 0.95


def test_heads_that_cost_more_than_they_save_are_not_used() -> None:
    service = Service(new_sequences(1), draft_s=0.02).run(1000, lambda _: 1.0)
    assert service.speed > 0.95
    assert sum(service.num_drafts.values()) < 100


def test_full_steps_get_no_drafts() -> None:
    """Check that drafts which pay for one sequence are not used where each draft costs as much as a row."""
    service = Service(new_sequences(200), draft_s=0.0003).run(200, lambda _: 0.8)
    assert service.speed > 0.95


def test_drafts_are_used_again_when_they_are_right() -> None:
    service = Service(new_sequences(4), draft_s=0.0002).run(1000, lambda _: 0.0)
    before = sum(service.num_drafts.values())
    service.run(MAX_PAUSE + 100, lambda _: 0.9)
    middle = sum(service.num_drafts.values())
    service.run(100, lambda _: 0.9)
    assert before < 200
    assert sum(service.num_drafts.values()) - middle > 100 * 4 * 2


def test_a_sequence_with_wrong_drafts_gets_few_and_waits_for_the_others() -> None:
    sequences = new_sequences(4)
    service = Service(sequences, draft_s=0.0004).run(600, lambda one: 0.0 if one is sequences[0] else 0.9)
    assert service.num_drafts[sequences[0]] < 100
    assert min(service.num_drafts[one] for one in sequences[1:]) > 1000
    assert service.proposer.begin(4, 1000)
    drafts = service.proposer.propose(sequences[0], MAX_DRAFTS)
    assert (drafts.max_tokens, drafts.waits) == (0, True)


def test_the_number_of_drafts_follows_the_acceptance_rate() -> None:
    """Check that the third draft, which is right in 3 % of steps, is left out."""
    service = Service(new_sequences(8), draft_s=0.0002).run(1500, lambda _: 0.5)
    counted = sum(service.num_drafts.values())
    few = Service(new_sequences(8), draft_s=0.0002).run(1500, lambda _: 0.95)
    assert counted < 0.8 * sum(few.num_drafts.values())


def test_a_step_has_so_many_drafts_together() -> None:
    service = Service(new_sequences(4), draft_s=0.0001).run(100, lambda _: 0.9)
    assert service.proposer.begin(4, 5)
    allowed = [service.proposer.propose(one, MAX_DRAFTS).max_tokens for one in service.sequences]
    assert allowed == [3, 2, 0, 0]
    assert service.proposer.begin(4, 1000)
    assert [service.proposer.propose(one, 1).max_tokens for one in service.sequences] == [1] * 4
    assert service.proposer.propose(service.sequences[0], -2).max_tokens == 0


def test_nothing_is_drafted_before_steps_were_timed() -> None:
    proposer = ShardDrafts(3, lambda num_tokens: 0.0)
    assert not proposer.begin(1, 100)
    assert not proposer.begin(0, 100)
    assert not Service(new_sequences(1), 0.0).proposer.begin(1, 100)
