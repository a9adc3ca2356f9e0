"""Prompt look-up: finds the last occurrence of a sequence's newest tokens and proposes the tokens after it,
if they are likely enough to be right to save time. The shards verify them."""

from collections.abc import Callable, Iterable
from itertools import accumulate
from operator import mul
from weakref import WeakKeyDictionary

from tgis.router.scheduling.step import NO_DRAFTS, DraftResult, Drafts, Step
from tgis.router.sequence import Sequence

BITS = 21  # bits of a token id
NGRAMS = (4, 2)  # n-gram sizes that find an earlier occurrence, longest first
MASKS = tuple((1 << BITS * size) - 1 for size in NGRAMS)
TOKENS_AT_ONCE = 512  # maximum number of a sequence's tokens that one step reads
# Initial probability that a match continues for one more token, by the length of the match. Longer matches
# use the last value.
FIRST_RATES = (0.0, 0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85)
MAX_LENGTH = len(FIRST_RATES) - 1
NEWEST_WEIGHT = 1 / 16  # weight of the newest token in these rates
# A sequence with drafts has at most one unanswered step. If it runs alone, the shards are idle between two
# steps for this fraction of a step; with other sequences, it misses every second step.
WAIT_FRACTION = 0.15
# Upper limit of a draft's cost, as a fraction of a step. The cost is unknown while all steps have the same
# size.
MAX_COST = 0.25


class NgramIndex:
    """Tokens of one sequence, an index of the token after each n-gram's last occurrence, and the success
    rates of such predictions."""

    def __init__(self, input_ids: Iterable[int]) -> None:
        self._token_ids: list[int] = []
        self._num_read = 0
        self._after: tuple[dict[int, int], ...] = tuple({} for _ in NGRAMS)
        self._newest = 0  # the newest tokens, packed into one number
        self._source = -1  # index of the expected next token, or -1
        self._length = 0  # length of the match before that token
        self._rates = list(FIRST_RATES)
        for token_id in input_ids:
            self._add(token_id)

    def read(self, token_ids: list[int]) -> bool:
        """Add at most TOKENS_AT_ONCE tokens that are new since the last call. Return True if none are left.
        `token_ids` must begin with the tokens of the last call."""
        end = self._num_read + TOKENS_AT_ONCE
        for token_id in token_ids[self._num_read : end]:
            self._add(token_id)
        self._num_read = min(end, len(token_ids))
        return self._num_read == len(token_ids)

    def chances(self, num_tokens: int) -> list[float]:
        """Return the probabilities that the next token is as expected, that the next two are, and so on;
        empty if there is no expectation."""
        if self._source < 0:
            return []
        lengths = range(self._length, self._length + num_tokens)
        return list(accumulate((self._rates[min(length, MAX_LENGTH)] for length in lengths), mul))

    def expect(self, num_tokens: int) -> list[int]:
        """Return the expected next tokens. There must be an expectation. A match that reaches the end of the
        text continues periodically."""
        expected = self._token_ids[self._source : self._source + num_tokens]
        period = len(self._token_ids) - self._source
        while len(expected) < num_tokens:
            expected.append(expected[-period])
        return expected

    def _add(self, token_id: int) -> None:
        token_ids = self._token_ids
        length = self._length
        if self._source >= 0:
            is_right = token_ids[self._source] == token_id
            self._rates[length] += NEWEST_WEIGHT * (is_right - self._rates[length])
            self._source = self._source + 1 if is_right else -1
            self._length = min(length + 1, MAX_LENGTH)
        token_ids.append(token_id)
        self._newest = (self._newest << BITS | token_id) & MASKS[0]
        for size, mask, after in zip(NGRAMS, MASKS, self._after, strict=True):
            ngram = self._newest & mask
            if self._source < 0:
                self._source = after.get(ngram, -1)
                self._length = size
            after[ngram] = len(token_ids)


class PromptLookup:
    """Proposer that uses prompt look-up."""

    def __init__(self, max_drafts: int, predict: Callable[[int], float]) -> None:
        """Create a proposer of at most `max_drafts` per sequence. `predict` returns the duration in seconds
        of a step with a number of tokens."""
        self._max_drafts = max_drafts
        self._predict = predict
        self._histories: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()
        self._left = 0
        # In seconds: time saved by a token, cost of a draft, fixed cost of having drafts.
        self._saved = self._cost = self._wait = 0.0

    def begin(self, num_sequences: int, max_drafts: int) -> bool:
        """Begin a step with at most `max_drafts` drafts. Return whether a draft can be worth its cost."""
        if max_drafts <= 0 or not num_sequences:
            return False
        self._left = max_drafts
        step = self._predict(num_sequences)
        self._saved = step / num_sequences
        self._cost = min(self._predict(num_sequences + 1) - step, MAX_COST * step)
        self._wait = WAIT_FRACTION * step if num_sequences == 1 else self._saved
        return self._saved > self._cost

    def propose(self, sequence: Sequence, max_drafts: int) -> Drafts:
        """Return drafts that are worth their cost."""
        max_drafts = min(max_drafts, self._left, self._max_drafts)
        if max_drafts <= 0:
            return NO_DRAFTS
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = NgramIndex(sequence.encoder_token_ids)
        if not history.read(sequence.token_ids):
            return NO_DRAFTS
        gains = [chance * self._saved - self._cost for chance in history.chances(max_drafts)]
        gains = [gain for gain in gains if gain > 0]  # the gains decrease
        if sum(gains) <= self._wait:
            return NO_DRAFTS
        if not sequence.num_unanswered:
            self._left -= len(gains)
        return Drafts(history.expect(len(gains)))

    def follows(self, sequence: Sequence, num_sequences: int) -> bool:
        """Return False: the shards have no speculator."""
        return False

    def observe(self, step: Step, results: Iterable[DraftResult], seconds: float, follow_s: float) -> None:
        """Do nothing: the indexes read the accepted tokens."""
