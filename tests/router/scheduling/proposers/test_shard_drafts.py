"""Check when the shards' drafts are used, with simulated steps of known cost and acceptance."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from tgis.router.scheduling.proposers.shard_drafts import ShardDrafts
from tgis.router.scheduling.step import DraftResult, Step, WorkItem
from tgis.router.scheduling.token_budget import TokenBudget
from tgis.router.sequence import Sequence as Generation
from tgis.router.sequence import Stopping

MAX_DRAFTS = 3
FIXED_S, ROW_S = 0.010, 0.0002  # of a step without drafts
ROUTER_S = 0.00103  # time of the router for a step of one sequence, for which shards are idle at most
IDLE = 0.15  # share of a step for which the shards wait while all sequences have drafts

Rate = Callable[[Generation], float]


def new_sequences(count: int) -> list[Generation]:
    return [Generation([1], Stopping(max_new_tokens=10_000)) for _ in range(count)]


@dataclass
class Service:
    """Shards that compute one step after the other, and count the tokens of each sequence."""

    sequences: list[Generation]
    draft_s: float
    heads_s: float = 0.0
    """Cost of a step with drafts."""
    follow_s: float = 0.0
    """Cost of following a sequence for a step."""
    delay_s: float = 0.0
    """Additional time of the next step with drafts."""
    has_prompts: bool = False
    """True if every step computes a prompt, too."""
    max_sequences: int | None = None
    """Maximum number of sequences with drafts in a step."""
    rates: Sequence[float] = (1.0,) * MAX_DRAFTS
    """Factors of the acceptance rate, by position."""
    slow_s: dict[int, float] = field(default_factory=dict)
    """Additional time of the first step with a number of drafts."""
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.budget = TokenBudget(1000, 1.0)
        self.budget.observe(100, FIXED_S + 100 * ROW_S)
        self.proposer = ShardDrafts(MAX_DRAFTS, self.budget.predict, self.max_sequences)
        self.seconds = 0.0
        self.num_tokens: dict[Generation, int] = dict.fromkeys(self.sequences, 0)
        self.num_drafts: dict[Generation, int] = dict.fromkeys(self.sequences, 0)
        self.num_followed = 0
        for sequence in self.sequences:
            self.admit(sequence)

    def admit(self, sequence: Generation) -> None:
        sequence.is_followed = self.proposer.follows(sequence, len(self.sequences))
        sequence.row = 0

    def replace(self, index: int) -> None:
        """Replace a sequence by a new one. The counts of tokens still refer to it."""
        self.sequences[index].row = None
        self.sequences[index] = new_sequences(1)[0]
        self.num_tokens[self.sequences[index]] = self.num_drafts[self.sequences[index]] = 0
        self.admit(self.sequences[index])

    def run(self, num_steps: int, rate: Rate, max_drafts: int = 1000) -> "Service":
        for _ in range(num_steps):
            self.step(rate, max_drafts)
        return self

    def run_renewed(self, num_steps: int, rate: Rate) -> None:
        """Run steps. After each 50 steps, a new sequence takes the place of one."""
        for number in range(num_steps):
            if number % 50 == 49:
                self.replace(number // 50 % len(self.sequences))
            self.step(rate, 1000)

    def count_numbers(self, num_steps: int, rate: Rate) -> Counter[int]:
        """Run steps of a single sequence. Return how many had each number of drafts."""
        numbers = Counter[int]()
        for _ in range(num_steps):
            before = sum(self.num_drafts.values())
            self.step(rate, 1000)
            numbers[sum(self.num_drafts.values()) - before] += 1
        return numbers

    def step(self, rate: Rate, max_drafts: int) -> None:
        is_drafting = self.proposer.begin(len(self.sequences), max_drafts)
        results = []
        for sequence in self.sequences:
            allowed = self.proposer.propose(sequence, MAX_DRAFTS).max_proposed if is_drafting else 0
            accepted = 0
            while accepted < allowed and self.rng.random() < rate(sequence) * self.rates[accepted]:
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
        work += [WorkItem(self.sequences[0], 0, 0, 9, False, False, ())] * self.has_prompts
        num_followed = sum(sequence.is_followed for sequence in self.sequences)
        self.num_followed += num_followed
        follow_s = num_followed * self.follow_s
        seconds = FIXED_S + count * ROW_S + num_drafts * self.draft_s + bool(results) * self.heads_s
        seconds += follow_s
        if results:
            seconds += self.delay_s + self.slow_s.pop(num_drafts, 0.0)
            self.delay_s = 0.0
        self.seconds += seconds * (1 + IDLE * bool(results))
        step = Step(0, work, count, 0, num_drafts, 0, False, [], num_followed)
        if not results:
            self.budget.observe(count, seconds)
        self.proposer.observe(step, results, seconds, follow_s)

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


@pytest.mark.parametrize("count", [1, 8])
def test_a_slow_step_ends_drafts_for_a_short_time_only(count: int) -> None:
    """Check that a delay of the first step with drafts, or of a later one, is not taken for their cost."""
    service = Service(new_sequences(count), draft_s=0.0002, delay_s=1.0)
    service.run_renewed(300, lambda _: 0.6)
    for _ in range(2):
        before = sum(service.num_drafts.values())
        service.run_renewed(200, lambda _: 0.6)
        assert sum(service.num_drafts.values()) - before > 150 * count
        service.delay_s = 1.0
        service.run_renewed(100, lambda _: 0.6)


@pytest.mark.parametrize("count", [1, 4])
def test_drafts_that_are_wrong_at_the_start_of_an_answer_pay(count: int) -> None:
    """Check that a trial covers more than the first tokens of an answer."""
    service = Service(new_sequences(count), draft_s=0.0002, delay_s=0.1)
    service.run_renewed(3000, lambda one: 0.0 if service.num_tokens[one] < 8 else 0.45)
    assert service.proposer.is_active
    assert service.speed > 1.15


def test_full_steps_get_no_drafts() -> None:
    """Check that drafts which pay for one sequence are not used where each draft costs as much as a row."""
    service = Service(new_sequences(200), draft_s=0.0003).run(200, lambda _: 0.8)
    assert service.speed > 0.95


def test_drafts_are_used_again_when_they_are_right() -> None:
    """Check that new sequences are followed again, and that these get drafts."""
    service = Service(new_sequences(4), draft_s=0.0002)
    service.run_renewed(1000, lambda _: 0.0)
    assert not service.proposer.is_active
    before = sum(service.num_drafts.values())
    service.run_renewed(2000, lambda _: 0.9)
    middle = sum(service.num_drafts.values())
    service.run_renewed(200, lambda _: 0.9)
    assert before < 200
    assert service.proposer.is_active
    assert sum(service.num_drafts.values()) - middle > 200 * 4 * 2


@pytest.mark.parametrize("count", [1, 8, 32])
def test_following_costs_little_where_drafts_are_wrong(count: int) -> None:
    """Check a speculator whose following alone takes as long as the sequences' own share of a step."""
    service = Service(new_sequences(count), draft_s=0.0005, follow_s=ROW_S)
    service.run_renewed(4000, lambda _: 0.0)
    assert service.speed > 0.95
    assert 0 < service.num_followed < 0.05 * 4000 * count
    # It is tried again, ever more rarely.
    before = service.num_followed
    service.run_renewed(6000, lambda _: 0.0)
    assert before < service.num_followed < before + 0.02 * 6000 * count


@pytest.mark.parametrize("count", [1, 8, 32])
def test_a_trial_ends_where_every_step_has_prompts(count: int) -> None:
    """Check that following costs little where no step shows the cost of drafts, and that a trial follows."""
    service = Service(new_sequences(count), draft_s=0.0002, follow_s=ROW_S, has_prompts=True)
    service.run_renewed(6000, lambda _: 0.9)
    assert not service.proposer.is_active
    assert service.speed > 0.95
    service.has_prompts = False
    before = sum(service.num_drafts.values())
    service.run_renewed(600, lambda _: 0.9)
    assert service.proposer.is_active == (count < 32)
    assert sum(service.num_drafts.values()) > before


def test_a_trial_continues_with_the_next_sequence_when_one_ends() -> None:
    """Check that a sequence which has ended, and which something still refers to, does not stop a trial."""
    service = Service(new_sequences(1), draft_s=0.0002).run(100, lambda _: 0.0)
    assert not service.proposer.is_active
    for number in range(800):
        if number % 7 == 6:
            service.replace(0)
        service.step(lambda _: 0.9, 1000)
    assert service.proposer.is_active


def test_following_that_costs_more_than_drafts_save_ends() -> None:
    service = Service(new_sequences(4), draft_s=0.0002, follow_s=0.002)
    service.run_renewed(1000, lambda _: 0.6)
    assert sum(service.num_drafts.values()) < 800
    assert service.num_followed < 800


def test_sequences_are_followed_again_when_few_sequences_pay() -> None:
    """Check that the load, not the speculator, decides where drafts pay for one sequence and not for 200."""
    service = Service(new_sequences(1), draft_s=0.0003).run(200, lambda _: 0.8)
    one = service.sequences[0]
    service.sequences += new_sequences(199)
    for sequence in service.sequences[1:]:
        service.num_tokens[sequence] = service.num_drafts[sequence] = 0
        service.admit(sequence)
    service.run(200, lambda _: 0.8)
    assert not any(sequence.is_followed for sequence in service.sequences)
    del service.sequences[1:]
    before = service.num_drafts[one]
    service.run(50, lambda _: 0.8)
    assert service.num_drafts[one] == before  # the speculator has missed steps of it
    service.replace(0)
    service.run(50, lambda _: 0.8)
    assert service.num_drafts[service.sequences[0]] > 50


def test_a_speculator_that_proposes_nothing_is_not_asked_again_and_again() -> None:
    service = Service(new_sequences(1), draft_s=0.0)
    num_asked = 0
    for number in range(1000):
        if number % 50 == 49:
            service.replace(0)
        is_drafting = service.proposer.begin(1, 1000)
        allowed = service.proposer.propose(service.sequences[0], 3).max_proposed if is_drafting else 0
        num_asked += bool(allowed)
        step = Step(0, [], 0, 0, allowed, 0, False, [], int(service.sequences[0].is_followed))
        service.budget.observe(1, FIXED_S)
        service.proposer.observe(step, [], FIXED_S, 0.0)
    assert 4 <= num_asked < 200


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


def find_best_number(heads_s: float, draft_s: float, rates: Sequence[float]) -> int:
    """Return the number of drafts with which a single sequence gets most tokens per second; 0: none."""
    plain = FIXED_S + ROW_S
    speeds, num_tokens, chance = [1 / plain], 1.0, 1.0
    for count, rate in enumerate(rates, 1):
        chance *= rate
        num_tokens += chance
        seconds = plain + heads_s + count * draft_s
        speeds.append(num_tokens / (seconds + min(IDLE * plain, ROUTER_S)))
    return speeds.index(max(speeds))


# Cost of having drafts, cost of each, rates by position if the drafts before are right, and the best number.
COSTS = [
    (0.0, 0.003, (0.8, 0.1, 0.5), 1),
    (0.002, 0.001, (0.8, 0.05, 0.5), 1),
    (0.0, 0.003, (0.9, 0.8, 0.1), 2),
    (0.002, 0.002, (0.9, 0.9, 0.05), 2),
    (0.004, 0.0005, (0.8, 0.7, 0.6), 3),
    (0.012, 0.001, (0.7, 0.4, 0.3), 0),
    (0.0, 0.0001, (0.005, 0.5, 0.5), 0),
]


@pytest.mark.parametrize(("heads_s", "draft_s", "rates", "best"), COSTS)
@pytest.mark.parametrize("seed", range(3))
def test_the_number_of_drafts_with_most_tokens_is_chosen_after_the_trial(
    heads_s: float, draft_s: float, rates: Sequence[float], best: int, seed: int
) -> None:
    assert find_best_number(heads_s, draft_s, rates) == best
    service = Service(new_sequences(1), draft_s, heads_s, rates=rates, rng=random.Random(seed))
    service.run(64, lambda _: 1.0)
    assert service.count_numbers(400, lambda _: 1.0)[best] > 300


def test_a_trial_measures_the_cost_of_each_draft() -> None:
    """Check that the costs which the trial learnt are those of the shards, although the first steps with each
    number of drafts are slow."""
    service = Service(new_sequences(1), draft_s=0.0015, heads_s=0.0025)
    service.slow_s = {1: 0.05, MAX_DRAFTS: 0.2}
    service.run(60, lambda _: 0.7)
    per_step, per_draft = service.proposer.costs
    assert per_draft == pytest.approx(0.0015, rel=0.05)
    assert per_step == pytest.approx(0.0025, rel=0.05)


def test_changes_are_logged_with_rates_and_costs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        service = Service(new_sequences(4), draft_s=0.0002, heads_s=0.002, follow_s=0.0001)
        service.run_renewed(70, lambda _: 1.0)
        service.run_renewed(600, lambda _: 0.0)
    begun, ended = caplog.messages
    assert begun.startswith("drafts of the speculator are expected to pay: new inputs get some (accepted by ")
    assert "drafts of a step cost 2.00 ms and each of them 0.20 ms" in begun
    assert "a step of 4 inputs without drafts takes 11.2" in begun
    assert ended.startswith("drafts of the speculator do not pay: it is no longer computed, except for ")
    assert "accepted by position: 0.1" in ended


def test_the_rates_of_all_positions_stay_known() -> None:
    """Check that more drafts are requested when further ones become right."""
    service = Service(new_sequences(1), draft_s=0.003, rates=(1.0, 0.05, 0.5)).run(400, lambda _: 0.9)
    assert service.count_numbers(200, lambda _: 0.9)[1] > 150
    service.rates = (1.0,) * MAX_DRAFTS
    service.run(2000, lambda _: 0.9)
    assert service.count_numbers(200, lambda _: 0.9)[MAX_DRAFTS] > 150


def test_a_step_has_so_many_drafts_for_few_sequences() -> None:
    """Check the limit of models that keep states."""
    service = Service(new_sequences(4), draft_s=0.0001, max_sequences=2).run(100, lambda _: 0.9)
    assert service.proposer.begin(4, 1000)
    drafts = [service.proposer.propose(one, MAX_DRAFTS) for one in service.sequences]
    assert [each.max_tokens for each in drafts] == [3, 3, 0, 0]
    assert all(each.waits for each in drafts)


def test_few_sequences_with_drafts_do_not_pay_for_many() -> None:
    """Check that the gain is that of the sequences that can have drafts."""
    service = Service(new_sequences(32), draft_s=0.0002, heads_s=0.004, max_sequences=2)
    assert service.run(1000, lambda _: 0.8).speed > 0.95


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
