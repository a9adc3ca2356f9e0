"""Trial of the shards' drafts: every few steps, one sequence gets some, until they can be judged."""

from weakref import WeakSet

from tgis.router.sequence import Sequence

# Steps without drafts before each step with some, so that a trial covers a large part of an answer.
SPACING = 4
NUM_STEPS = 12  # steps with drafts
MIN_STEPS = 6  # steps with drafts after which a trial ends if no draft was accepted
MAX_HOPELESS = 3  # steps whose drafts would have cost more than they save even if all had been accepted
MAX_EMPTY = 4  # steps for which the shards may propose nothing
# Steps without drafts while sequences are followed. Where prompts are in every step, none is timed, and there
# would never be drafts.
MAX_PLAIN = 256


class DraftTrial:
    """Steps with drafts. Every second one has a single draft, so that the cost of each further draft is known
    as well as that of having drafts at all."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_accepted = 0
        self._num_hopeless = 0
        self._num_empty = 0
        self._num_plain = 0
        self._is_due = False
        self._has_single = False  # the next step with drafts has one
        self._timed = set[int]()  # numbers of drafts of the steps so far
        self._tried: WeakSet[Sequence] = WeakSet()  # in the present turn

    def begin(self, num_plain_steps: int) -> bool:
        """Begin a step after that many without drafts. Return True if a sequence should get some."""
        if self._is_due:  # all sequences that could have drafts in the step before had their turn
            self._tried.clear()
        self._is_due = num_plain_steps >= SPACING
        return self._is_due

    def takes(self, sequence: Sequence) -> bool:
        """Return True if this sequence gets the drafts of the step. Sequences get some in turns."""
        if not self._is_due or sequence in self._tried:
            return False
        self._tried.add(sequence)
        self._is_due = False
        return True

    def choose_number(self, max_drafts: int) -> int:
        """Return the number of drafts of the next step with some, at most `max_drafts`."""
        has_single = self._has_single
        self._has_single = not self._has_single
        return 1 if has_single else max_drafts

    def is_warm(self, num_drafts: int) -> bool:
        """Return True if there was a step with that many drafts. The first one is slow."""
        is_warm = num_drafts in self._timed
        self._timed.add(num_drafts)
        return is_warm

    @property
    def is_over(self) -> bool:
        has_failed = self.num_steps >= MIN_STEPS and not self.num_accepted
        is_futile = self._num_hopeless >= MAX_HOPELESS or self._num_empty >= MAX_EMPTY
        return self.num_steps >= NUM_STEPS or has_failed or is_futile or self._num_plain >= MAX_PLAIN

    def observe(self, num_accepted: int, is_hopeless: bool) -> None:
        self.num_steps += 1
        self.num_accepted += num_accepted
        self._num_hopeless += is_hopeless

    def observe_empty(self) -> None:
        self._num_empty += 1

    def observe_plain(self) -> None:
        self._num_plain += 1
