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
from tgis.router.scheduling.proposers.draft_trial import DraftTrial
from tgis.router.scheduling.step import NO_DRAFTS, DraftResult, Drafts, Step
from tgis.router.sequence import Sequence

logger = logging.getLogger(__name__)

FIRST_RATE = 0.5  # initial acceptance rate of every position
FIRST_WEIGHT = 3  # number of observations that rates stand for at the beginning of a trial
MIN_WEIGHT = 1 / 64  # minimum weight of the newest draft in the rates of all sequences together
SEQUENCE_WEIGHT = 1 / 16  # weight of the newest draft in the rates of its own sequence
COST_DECAY = 0.93  # factor by which each observed cost reduces the weight of earlier ones
FOLLOW_DECAY = 0.98  # factor by which each observed time of following reduces the weight of earlier ones
MAX_COST = 4.0  # limit of an observed cost, in steps without drafts: more is a delay that has another cause
FIRST_COST = 0.25  # limit of a draft's cost before the first one is observed, as a fraction of a step
# The shards are idle between two steps for about this fraction of a step if every sequence waits for its
# answer, and no longer than the router takes for a step.
WAIT_FRACTION = 0.15
ROUTER_STEP_S, ROUTER_SEQUENCE_S = 1e-3, 3e-5
# After this number of steps in which drafts do not pay, the shards' speculator stops following the sequences.
MAX_UNPAID_STEPS = 64
# From then on, a new sequence is followed for a trial after this number of steps without drafts, after twice
# as many if the trial fails, and so on up to the maximum.
MIN_PAUSE, MAX_PAUSE = 256, 8192
# One in so many times, a sequence gets another number of drafts than the best one, so that the cost of each
# draft and the rates of all positions stay known.
EXPLORING = 64
SEQUENCE_PAUSE = 32  # steps after which a sequence gets a draft again, although they do not pay for it


class AcceptanceRates:
    """Rates at which drafts are accepted if the drafts before them are, by position."""

    def __init__(self, rates: Iterable[float], min_weight: float, num_observed: int) -> None:
        self._rates = list(rates)
        self._min_weight = min_weight
        self._num_observed = [num_observed] * len(self._rates)
        self.num_skipped = 0  # steps without drafts since the last ones

    def copy(self, weight: float) -> "AcceptanceRates":
        return AcceptanceRates(self._rates, weight, round(1 / weight))

    def chances(self) -> list[float]:
        """Return the probabilities that the first draft is accepted, that the first two are, and so on."""
        return list(accumulate(self._rates, mul))

    def forget(self, num_observed: int) -> None:
        """Give the rates the weight of that many observations."""
        self._num_observed = [num_observed] * len(self._rates)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        self.num_skipped = 0
        for position in range(min(num_accepted + 1, num_drafts, len(self._rates))):
            self._num_observed[position] += 1
            weight = max(1 / self._num_observed[position], self._min_weight)
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
    without drafts. It cannot catch up with a running sequence, because the served model would have to compute
    all states again. So new sequences are followed only if drafts are expected to pay for the present number
    of sequences, or one of them for a trial.

    The first tokens of an answer are the hardest to predict, and the first steps with drafts are slow, so
    rates and costs are those of a trial, not of its first drafts. A service begins with a trial that follows
    all sequences."""

    def __init__(
        self, max_drafts: int, predict: Callable[[int], float], max_sequences: int | None = None
    ) -> None:
        """Create a proposer of at most `max_drafts` per sequence, for at most `max_sequences` in a step if
        there is such a limit. `predict` returns the duration in seconds of a step with a number of tokens and
        without drafts."""
        self._max_drafts = max_drafts
        self._max_sequences = max_sequences
        self._predict = predict
        self._rates = AcceptanceRates([FIRST_RATE] * max_drafts, MIN_WEIGHT, FIRST_WEIGHT)
        self._rates_of: WeakKeyDictionary[Sequence, AcceptanceRates] = WeakKeyDictionary()
        self._cost_fit = LinearFit(COST_DECAY)
        self._follow_fit = LinearFit(FOLLOW_DECAY)
        self._costs = Costs(0.0, 0.0, 0.0)
        self._left = 0
        self._sequences_left = 0
        self._num_drafting = 0  # number of times that a sequence got drafts because they pay
        self._pays = False
        self._trial: DraftTrial | None = DraftTrial()
        self._is_active = True
        self._is_useless = False  # no draft of the last trial was accepted
        self._followed: WeakSet[Sequence] = WeakSet()
        self._num_plain_steps = 0  # since the last step with drafts
        self._num_unpaid_steps = 0  # since drafts paid
        self._pause = MIN_PAUSE

    @property
    def is_active(self) -> bool:
        """False while drafts are not expected to pay, so that new sequences are followed only for trials."""
        return self._is_active

    @property
    def costs(self) -> tuple[float, float]:
        """Measured seconds that drafts add to a step: of having some at all, and of each."""
        return self._cost_fit.solve()

    def begin(self, num_sequences: int, max_drafts: int) -> bool:
        """Begin a step with at most `max_drafts` drafts. Return whether any sequence should get drafts or
        wait."""
        self._pays = False
        step = self._predict(num_sequences) if num_sequences else 0.0
        if max_drafts <= 0 or step <= 0:
            return False
        self._left = max_drafts
        self._sequences_left = max_drafts if self._max_sequences is None else self._max_sequences
        if self._trial is not None:
            return self._trial.begin(self._num_plain_steps)
        num_followed = min(num_sequences, len(self._followed))
        self._costs = self._find_costs(step, num_sequences, num_followed)
        self._pays = self._find_gain(self._rates.chances(), self._costs, num_followed) > 0
        return self._pays

    def follows(self, sequence: Sequence, num_sequences: int) -> bool:
        """Return True if the speculator should follow a new sequence, as one of `num_sequences`."""
        if sequence in self._followed:
            return True
        if self._expects_gain(num_sequences) or self._needs_one():
            self._followed.add(sequence)
            return True
        return False

    def _expects_gain(self, num_sequences: int) -> bool:
        """Return True if drafts are expected to pay. A trial does not change the expectation before it
        ends."""
        if self._trial is not None:
            return self._is_active
        if self._is_useless:
            return False
        would_pay = self._would_pay(num_sequences)
        if would_pay and not self._is_active:
            self._is_active = True
            text = "drafts of the speculator are expected to pay again: new inputs get some (%s)"
            logger.info(text, self._describe(num_sequences))
        return would_pay

    def _needs_one(self) -> bool:
        """Return True if a sequence must be followed for a trial, which begins now if it is due."""
        if any(sequence.row is not None for sequence in self._followed):
            return False
        if self._trial is None and self._num_plain_steps >= self._pause:
            self._trial = DraftTrial()
            self._rates.forget(FIRST_WEIGHT)
            self._cost_fit = LinearFit(COST_DECAY)
        return self._trial is not None

    def propose(self, sequence: Sequence, max_drafts: int) -> Drafts:
        """Return the number of drafts that the shards may propose."""
        if not sequence.is_followed:
            return NO_DRAFTS
        max_drafts = min(max_drafts, self._left, self._max_drafts)
        if not self._pays:
            return self._try_drafts(sequence, max_drafts)
        rates = self._rates_of.get(sequence)
        if rates is None:
            rates = self._rates_of[sequence] = self._rates.copy(SEQUENCE_WEIGHT)
        count = 0
        if max_drafts > 0 and self._sequences_left:
            count, _ = find_best(rates.chances()[:max_drafts], self._costs)
            if count:
                count = self._explore(count, max_drafts)
            elif rates.num_skipped >= SEQUENCE_PAUSE:
                count = 1
        rates.num_skipped += not (count or sequence.num_unanswered)
        self._left -= count
        self._sequences_left -= count > 0
        return Drafts(max_proposed=count, waits=True)

    def _explore(self, count: int, max_drafts: int) -> int:
        """Return the number of drafts, or now and then another one."""
        self._num_drafting += 1
        if self._num_drafting % EXPLORING:
            return count
        return max_drafts if count < max_drafts else 1

    def _try_drafts(self, sequence: Sequence, max_drafts: int) -> Drafts:
        if self._trial is None or max_drafts <= 0 or not self._trial.takes(sequence):
            return NO_DRAFTS
        self._num_plain_steps = 0  # before the answer, which comes after some plain steps
        return Drafts(max_proposed=self._trial.choose_number(max_drafts))

    def observe(self, step: Step, results: Iterable[DraftResult], seconds: float, follow_s: float) -> None:
        """Learn the acceptance rates, and the costs from the steps without prompts."""
        results = list(results)
        num_drafts = sum(result.num_drafts for result in results)
        if not step.num_prompts:
            self._observe_costs(step, num_drafts, seconds, follow_s)
        for result in results:
            self._rates.observe(result.num_drafts, result.num_accepted)
            if (rates := self._rates_of.get(result.sequence)) is not None:
                rates.observe(result.num_drafts, result.num_accepted)
        if self._trial is None:
            self._count_unpaid(len(step.work))
        elif step.max_proposed or step.num_followed:
            self._judge(self._trial, step, sum(result.num_accepted for result in results), bool(num_drafts))

    def _observe_costs(self, step: Step, num_drafts: int, seconds: float, follow_s: float) -> None:
        if not step.max_proposed:
            self._num_plain_steps += 1
            if step.num_followed:
                self._follow_fit.observe(step.num_followed, follow_s)
            return
        self._num_plain_steps = 0
        if num_drafts and (self._trial is None or self._trial.is_warm(num_drafts)):
            plain = self._predict(step.num_tokens - step.max_proposed)
            self._cost_fit.observe(num_drafts, min(max(seconds - plain, 0.0), MAX_COST * plain))

    def _judge(self, trial: DraftTrial, step: Step, num_accepted: int, has_drafts: bool) -> None:
        """Count a step of the trial. End it if it is over, and decide whether drafts are expected to pay."""
        num_sequences = len(step.work)
        if has_drafts:
            trial.observe(num_accepted, is_hopeless=not self._could_pay(num_sequences))
        elif step.max_proposed:
            trial.observe_empty()
        else:
            trial.observe_plain()
        if not trial.is_over:
            return
        self._trial = None
        self._is_useless = not trial.num_accepted
        if not self._is_useless and self._would_pay(num_sequences):
            self._is_active = True
            self._pause = MIN_PAUSE
            text = "drafts of the speculator are expected to pay: new inputs get some (%s)"
            logger.info(text, self._describe(num_sequences))
        else:
            self._stop_following(num_sequences)

    def _count_unpaid(self, num_sequences: int) -> None:
        """Count steps in which drafts do not pay. After too many, let the shards follow no sequence."""
        self._num_unpaid_steps = 0 if self._pays or not self._followed else self._num_unpaid_steps + 1
        if self._num_unpaid_steps > MAX_UNPAID_STEPS:
            self._stop_following(num_sequences)

    def _stop_following(self, num_sequences: int) -> None:
        """Let the shards follow no sequence, and choose the number of steps before the next trial."""
        for sequence in self._followed:
            stop_following(sequence)
        self._followed.clear()
        if self._is_active:
            self._is_active = False
            text = "drafts of the speculator do not pay: it is no longer computed, except for trials (%s)"
            logger.info(text, self._describe(num_sequences))
        else:
            self._pause = min(2 * self._pause, MAX_PAUSE)
        self._num_plain_steps = self._num_unpaid_steps = 0

    def _describe(self, num_sequences: int) -> str:
        """Return the acceptance rates and the costs for that many sequences, as text for the log."""
        shares = " ".join(f"{chance:.2f}" for chance in self._rates.chances())
        per_step, per_draft = self.costs
        step, follow = self._predict(num_sequences), self._predict_following(num_sequences)
        return (
            f"accepted by position: {shares}; drafts of a step cost {1e3 * per_step:.2f} ms and each of them "
            f"{1e3 * per_draft:.2f} ms, a step of {num_sequences} inputs without drafts takes "
            f"{1e3 * step:.2f} ms, of which the speculator takes {1e3 * follow:.2f} ms"
        )

    def _would_pay(self, num_sequences: int) -> bool:
        """Return True if drafts are expected to pay for that many sequences."""
        return self._predict_gain(self._rates.chances(), num_sequences) > 0

    def _could_pay(self, num_sequences: int) -> bool:
        """Return True if drafts would pay for that many sequences if all were accepted."""
        return self._predict_gain([1.0] * self._max_drafts, num_sequences) > 0

    def _predict_gain(self, chances: list[float], num_sequences: int) -> float:
        """Return the seconds that drafts save in a step of that many sequences, all of them followed."""
        step = self._predict(num_sequences)
        if step <= 0:
            return 0.0
        return self._find_gain(chances, self._find_costs(step, num_sequences, num_sequences), num_sequences)

    def _find_gain(self, chances: list[float], costs: Costs, num_followed: int) -> float:
        """Return the seconds that the best number of drafts is expected to save in a step, or less than zero
        if it costs more. `num_followed` sequences can have drafts."""
        _, gain = find_best(chances, costs)
        num_drafting = min(num_followed, self._max_sequences or num_followed)
        return num_drafting * gain - costs.per_step - self._predict_following(num_followed)

    def _predict_following(self, num_followed: int) -> float:
        """Return the predicted seconds in which the speculator follows a step of that many sequences."""
        fixed, per_sequence = self._follow_fit.solve()
        return fixed + per_sequence * num_followed if num_followed else 0.0

    def _find_costs(self, step: float, num_sequences: int, num_followed: int) -> Costs:
        """Return the costs in a step that takes `step` seconds without drafts, following included."""
        saved = max(step - self._predict_following(num_followed), 0.0) / num_sequences
        wait_s = min(WAIT_FRACTION * step, ROUTER_STEP_S + num_sequences * ROUTER_SEQUENCE_S)
        if self._cost_fit.is_empty:
            per_draft = min(self._predict(num_sequences + 1) - step, FIRST_COST * step)
            return Costs(saved, per_draft, wait_s)
        per_step, per_draft = self._cost_fit.solve()
        return Costs(saved, per_draft, per_step + wait_s)


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
