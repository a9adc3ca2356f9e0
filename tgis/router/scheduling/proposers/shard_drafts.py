"""Drafts of the shards' speculator: decides how many each sequence gets, by their measured cost and the rates
at which they were accepted."""

import logging
from collections.abc import Callable, Iterable
from itertools import accumulate
from operator import mul
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from tgis.router.scheduling.linear_fit import LinearFit
from tgis.router.scheduling.prefix_cache import stop_following
from tgis.router.scheduling.step import NO_DRAFTS, DraftResult, Drafts, Step
from tgis.router.sequence import Sequence

logger = logging.getLogger(__name__)

FIRST_RATE = 0.5  # initial acceptance rate of every position
MIN_WEIGHT = 1 / 32  # minimum weight of the newest draft in the rates of all sequences together
SEQUENCE_WEIGHT = 1 / 16  # weight of the newest draft in the rates of its own sequence
COST_DECAY = 0.9  # factor by which each observed cost reduces the weight of earlier ones
MAX_COST = 4.0  # limit of an observed cost, in steps without drafts: more is a delay that has another cause
FIRST_COST = 0.25  # limit of a draft's cost before the first one is observed, as a fraction of a step
# The shards are idle between two steps for this fraction of a step if every sequence waits for its answer.
WAIT_FRACTION = 0.15
MIN_PLAIN_STEPS = 4  # steps that must be timed before the first draft
# While drafts do not pay, one sequence gets some after this number of steps, then after twice as many, and so
# on up to the maximum.
MIN_PAUSE, MAX_PAUSE = 32, 512
MAX_EMPTY = 4  # requests for drafts that the shards may answer with none, which then count as a wrong draft
# After this number of steps in which drafts do not pay, the shards' speculator stops following the sequences.
MAX_UNPAID_STEPS = 64
# From then on, a new sequence is followed for a trial after this number of steps without drafts, then after
# twice as many, and so on up to the maximum.
MIN_FOLLOW_PAUSE, MAX_FOLLOW_PAUSE = 256, 8192
MAX_FAILURES = 3  # steps of a trial, one after the other, whose drafts are worse than expected
FOLLOW_DECAY = 0.98  # factor by which each observed time of following reduces the weight of earlier ones
SEQUENCE_PAUSE = 32  # steps after which a sequence gets a draft again, although they do not pay for it


class AcceptanceRates:
    """Rates at which drafts are accepted if the drafts before them are, by position."""

    def __init__(self, rates: Iterable[float], min_weight: float, num_observed: int) -> None:
        self._rates = list(rates)
        self._min_weight = min_weight
        self._num_observed = num_observed
        self.num_skipped = 0  # steps without drafts since the last ones

    def copy(self, weight: float) -> "AcceptanceRates":
        return AcceptanceRates(self._rates, weight, round(1 / weight))

    def chances(self) -> list[float]:
        """Return the probabilities that the first draft is accepted, that the first two are, and so on."""
        return list(accumulate(self._rates, mul))

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        self.num_skipped = 0
        self._num_observed += 1
        weight = max(1 / self._num_observed, self._min_weight)
        for position in range(min(num_accepted + 1, num_drafts, len(self._rates))):
            self._rates[position] += weight * ((position < num_accepted) - self._rates[position])


class Costs(NamedTuple):
    """Costs and savings in a step, in seconds."""

    saved: float
    """Time that an accepted draft saves."""
    per_draft: float
    per_step: float
    """Cost of having drafts at all."""


class ShardDrafts:
    """Proposer that leaves the drafts to the shards.

    A sequence with drafts has at most one unanswered step. If drafts pay for the sequences together, all of
    them wait for their answers, so that each step has all of them.

    The shards' speculator must follow each step of a sequence, prompts included, which takes time even
    without drafts. While drafts do not pay, it follows none. It cannot catch up with a running sequence,
    because the served model would have to compute all states again. So only new sequences are followed when
    drafts are expected to pay again, or one of them for a trial."""

    def __init__(self, max_drafts: int, predict: Callable[[int], float]) -> None:
        """Create a proposer of at most `max_drafts` per sequence. `predict` returns the duration in seconds
        of a step with a number of tokens and without drafts."""
        self._max_drafts = max_drafts
        self._predict = predict
        self._rates = AcceptanceRates([FIRST_RATE] * max_drafts, MIN_WEIGHT, num_observed=3)
        self._rates_of: WeakKeyDictionary[Sequence, AcceptanceRates] = WeakKeyDictionary()
        self._cost_fit = LinearFit(COST_DECAY)
        self._costs = Costs(0.0, 0.0, 0.0)
        self._left = 0
        self._pays = self._may_try = False
        self._tries = False  # the next observed cost is that of a trial
        self._num_plain_steps = 0  # since the last step with drafts
        self._num_empty = 0  # requests for drafts since the last ones
        self._pause = MIN_PLAIN_STEPS
        self._follow_fit = LinearFit(FOLLOW_DECAY)
        self._followed: WeakSet[Sequence] = WeakSet()
        self._follows_all = True  # all new sequences
        self._num_unpaid_steps = 0  # since drafts paid
        self._follow_pause = 1
        self._num_failures = 0  # of the present trial

    @property
    def follows_all(self) -> bool:
        """False while drafts are not expected to pay, so that new sequences are followed only for trials."""
        return self._follows_all

    def begin(self, num_sequences: int, max_drafts: int) -> bool:
        """Begin a step with at most `max_drafts` drafts. Return whether any sequence should get drafts or
        wait."""
        self._pays = self._may_try = False
        step = self._predict(num_sequences) if num_sequences else 0.0
        if max_drafts <= 0 or step <= 0:
            return False
        self._left = max_drafts
        self._costs = costs = self._find_costs(step, num_sequences)
        if self._cost_fit.is_empty and self._num_plain_steps < MIN_PLAIN_STEPS:
            return False
        self._pays = self._find_gain(costs, min(num_sequences, len(self._followed))) > 0
        self._may_try = self._num_plain_steps >= self._pause
        return self._pays or self._may_try

    def follows(self, sequence: Sequence, num_sequences: int) -> bool:
        """Return True if the speculator should follow a new sequence: unless drafts have not paid for long.
        Then, if they are expected to pay for `num_sequences`, or for a trial."""
        is_trial = self._num_plain_steps >= self._follow_pause and not self._followed
        if not self._follows_all and self._would_pay(num_sequences):
            self._follows_all = True
            logger.info("drafts of the speculator are expected to pay again: new inputs get some")
        if self._follows_all or is_trial or sequence in self._followed:
            self._followed.add(sequence)
            return True
        return False

    def propose(self, sequence: Sequence, max_drafts: int) -> Drafts:
        """Return the number of drafts that the shards may propose."""
        if not sequence.is_followed:
            return NO_DRAFTS
        max_drafts = min(max_drafts, self._left, self._max_drafts)
        if not self._pays:
            return self._try_drafts(max_drafts)
        rates = self._rates_of.get(sequence)
        if rates is None:
            rates = self._rates_of[sequence] = self._rates.copy(SEQUENCE_WEIGHT)
        count = 0
        if max_drafts > 0:
            count, _ = find_best(rates.chances()[:max_drafts], self._costs)
            if not count and rates.num_skipped >= SEQUENCE_PAUSE:
                count = 1
        rates.num_skipped += not (count or sequence.num_unanswered)
        self._left -= count
        return Drafts(max_proposed=count, waits=True)

    def observe(self, step: Step, results: Iterable[DraftResult], seconds: float, follow_s: float) -> None:
        """Learn the acceptance rates, and the cost of drafts from the steps without prompts."""
        results = list(results)
        num_drafts = sum(result.num_drafts for result in results)
        if num_drafts and not step.num_prompts:
            self._observe_cost(step, num_drafts, seconds)
        self._observe_results(step, results, num_drafts)
        if not step.max_proposed and not step.num_prompts:
            self._num_plain_steps += 1
            if step.num_followed:
                self._follow_fit.observe(step.num_followed, follow_s)
        self._count_unpaid()

    def _observe_cost(self, step: Step, num_drafts: int, seconds: float) -> None:
        if self._tries:  # an earlier step may have been slow for another reason
            self._cost_fit = LinearFit(COST_DECAY)
            self._tries = False
        plain = self._predict(step.num_tokens - step.max_proposed)
        self._cost_fit.observe(num_drafts, min(max(seconds - plain, 0.0), MAX_COST * plain))

    def _observe_results(self, step: Step, results: list[DraftResult], num_drafts: int) -> None:
        """Learn the acceptance rates, and plan the next trial."""
        expected = sum(self._rates.chances())
        for result in results:
            self._rates.observe(result.num_drafts, result.num_accepted)
            if (rates := self._rates_of.get(result.sequence)) is not None:
                rates.observe(result.num_drafts, result.num_accepted)
        if num_drafts:
            num_accepted = max(result.num_accepted for result in results)
            self._plan_next(is_promising=num_accepted > expected and self._may_pay(step))
        elif step.max_proposed:
            self._num_empty += 1
            if self._num_empty >= MAX_EMPTY:
                self._rates.observe(1, 0)
                self._plan_next(is_promising=False)

    def _may_pay(self, step: Step) -> bool:
        """Return True if drafts would pay in such a step if all were accepted."""
        num_sequences = len(step.work)
        costs = self._find_costs(self._predict(num_sequences), num_sequences)
        return costs.saved > costs.per_draft

    def _count_unpaid(self) -> None:
        """Count steps in which drafts do not pay. After too many, let the shards follow no sequence."""
        self._num_unpaid_steps = 0 if self._pays or not self._followed else self._num_unpaid_steps + 1
        if self._num_unpaid_steps > MAX_UNPAID_STEPS:
            self._stop_following()

    def _would_pay(self, num_sequences: int) -> bool:
        """Return True if drafts are expected to pay for that many sequences."""
        step = self._predict(num_sequences)
        return step > 0 and self._find_gain(self._find_costs(step, num_sequences), num_sequences) > 0

    def _find_gain(self, costs: Costs, num_followed: int) -> float:
        """Return the seconds that the best number of drafts is expected to save in a step, or less than zero
        if it costs more. `num_followed` sequences can have drafts."""
        _, gain = find_best(self._rates.chances(), costs)
        return num_followed * gain - costs.per_step - self._predict_following(num_followed)

    def _predict_following(self, num_followed: int) -> float:
        """Return the predicted seconds in which the speculator follows a step of that many sequences."""
        fixed, per_sequence = self._follow_fit.solve()
        return fixed + per_sequence * num_followed if num_followed else 0.0

    def _find_costs(self, step: float, num_sequences: int) -> Costs:
        follow_s = self._predict_following(min(num_sequences, len(self._followed)))
        saved = max(step - follow_s, 0.0) / num_sequences
        if self._cost_fit.is_empty:
            per_draft = min(self._predict(num_sequences + 1) - step, FIRST_COST * step)
            return Costs(saved, per_draft, WAIT_FRACTION * step)
        per_step, per_draft = self._cost_fit.solve()
        return Costs(saved, per_draft, per_step + WAIT_FRACTION * step)

    def _try_drafts(self, max_drafts: int) -> Drafts:
        """Return drafts of a followed sequence that can have some, to learn whether they would pay. It is the
        first one of a step."""
        if not self._may_try or max_drafts <= 0:
            return NO_DRAFTS
        self._may_try = False
        self._tries = True
        return Drafts(max_proposed=max_drafts)

    def _plan_next(self, is_promising: bool) -> None:
        """Choose the number of plain steps before the next trial. It matters only while drafts do not pay."""
        was_trial = self._num_plain_steps >= self._pause
        self._num_plain_steps = self._num_empty = 0
        if is_promising:
            self._pause = self._follow_pause = 1
            self._num_failures = self._num_unpaid_steps = 0
        elif self._follows_all:
            self._pause = min(max(2 * self._pause, MIN_PAUSE), MAX_PAUSE) if was_trial else MIN_PAUSE
        else:
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                self._stop_following()

    def _stop_following(self) -> None:
        """Let the shards follow no sequence, and choose the number of steps before the next trial."""
        for sequence in self._followed:
            stop_following(sequence)
        self._followed.clear()
        if self._follows_all:
            self._follows_all = False
            logger.info("drafts of the speculator do not pay: it is no longer computed, except for trials")
        self._num_plain_steps = self._num_unpaid_steps = self._num_failures = 0
        self._pause = 1
        self._follow_pause = min(max(2 * self._follow_pause, MIN_FOLLOW_PAUSE), MAX_FOLLOW_PAUSE)


def find_best(chances: list[float], costs: Costs) -> tuple[int, float]:
    """Return the number of drafts with the largest gain, and that gain in seconds; 0 if none is worth it."""
    best = 0
    best_gain = gain = 0.0
    for count, chance in enumerate(chances, 1):
        gain += chance * costs.saved - costs.per_draft
        if gain > best_gain:
            best = count
            best_gain = gain
    return best, best_gain
