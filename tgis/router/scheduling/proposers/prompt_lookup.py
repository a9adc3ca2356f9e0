"""Guesses at a sequence's next tokens, for the shards to verify: what followed the last time that its newest
tokens occurred in it, where that is likely to be right often enough to pay."""

from collections.abc import Callable, Iterable
from itertools import accumulate
from operator import mul
from weakref import WeakKeyDictionary

from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.sequence import Sequence

BITS = 21  # of a token id
NGRAMS = (4, 2)  # tokens by which an earlier place is found, longest first
MASKS = tuple((1 << BITS * size) - 1 for size in NGRAMS)
TOKENS_AT_ONCE = 512  # of a sequence that are looked into for one step
# How often a repetition of so many tokens goes on by one more, before anything is known of a text; of longer
# ones as often as of the last.
FIRST_RATES = (0.0, 0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85)
MAX_LENGTH = len(FIRST_RATES) - 1
NEWEST = 1 / 16  # weight of the newest token in these rates
# A sequence with drafts is in one unanswered step at most. By itself it leaves the shards waiting between two
# for this part of a step; beside others it misses every second one.
WAIT = 0.15
# The most that a draft costs, as a part of a step: while all steps are of one size, none has told.
MAX_COST = 0.25


class History:
    """Tokens, after each of their n-grams' last occurrence what came next, and how well that has foretold
    what comes."""

    def __init__(self, input_ids: Iterable[int]) -> None:
        self._token_ids: list[int] = []
        self._num_read = 0
        self._after: tuple[dict[int, int], ...] = tuple({} for _ in NGRAMS)
        self._newest = 0  # the last tokens as one number
        self._source = -1  # the place of what is expected next
        self._length = 0  # tokens before it that are like the last ones
        self._rates = list(FIRST_RATES)
        for token_id in input_ids:
            self._add(token_id)

    def read(self, token_ids: list[int]) -> bool:
        """Tokens behind the input, which are those of the last time and more; True where it is through."""
        end = self._num_read + TOKENS_AT_ONCE
        for token_id in token_ids[self._num_read : end]:
            self._add(token_id)
        self._num_read = min(end, len(token_ids))
        return self._num_read == len(token_ids)

    def chances(self, num_tokens: int) -> list[float]:
        """That the next token comes as expected, that the next two do, and so on; empty where nothing is
        expected."""
        if self._source < 0:
            return []
        lengths = range(self._length, self._length + num_tokens)
        return list(accumulate((self._rates[min(length, MAX_LENGTH)] for length in lengths), mul))

    def expect(self, num_tokens: int) -> list[int]:
        """The next tokens, where anything is expected; a repetition that has reached itself goes round."""
        expected = self._token_ids[self._source : self._source + num_tokens]
        period = len(self._token_ids) - self._source
        while len(expected) < num_tokens:
            expected.append(expected[-period])
        return expected

    def _add(self, token_id: int) -> None:
        token_ids, length = self._token_ids, self._length
        if self._source >= 0:
            is_right = token_ids[self._source] == token_id
            self._rates[length] += NEWEST * (is_right - self._rates[length])
            self._source = self._source + 1 if is_right else -1
            self._length = min(length + 1, MAX_LENGTH)
        token_ids.append(token_id)
        self._newest = (self._newest << BITS | token_id) & MASKS[0]
        for size, mask, after in zip(NGRAMS, MASKS, self._after, strict=True):
            ngram = self._newest & mask
            if self._source < 0:
                self._source, self._length = after.get(ngram, -1), size
            after[ngram] = len(token_ids)


class Drafter:
    """Guesses for one step after the other."""

    def __init__(self, max_drafts: int, predict: Callable[[int], float]) -> None:
        """At most `max_drafts` for a sequence; `predict` knows the seconds of a step of so many tokens."""
        self._max_drafts, self._predict = max_drafts, predict
        self._histories: WeakKeyDictionary[Sequence, History] = WeakKeyDictionary()
        self._left = 0
        self._saved = self._cost = self._wait = 0.0  # seconds: of a token, of a draft, of having any

    def begin(self, num_sequences: int, most: int) -> bool:
        """A step for so many sequences, with so many drafts at most; whether any can be worth it."""
        if most <= 0 or not num_sequences:
            return False
        self._left = most
        step = self._predict(num_sequences)
        self._saved = step / num_sequences
        self._cost = min(self._predict(num_sequences + 1) - step, MAX_COST * step)
        self._wait = WAIT * step if num_sequences == 1 else self._saved
        return self._saved > self._cost

    def guess(self, sequence: Sequence, most: int) -> list[int]:
        """What follows the sequence's known tokens, and is part of the step where none is unanswered; empty
        where nothing is worth a try."""
        most = min(most, self._left, self._max_drafts)
        if most <= 0:
            return []
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = History(sequence.encoder_token_ids)
        if not history.read(sequence.token_ids):
            return []
        gains = [chance * self._saved - self._cost for chance in history.chances(most)]
        gains = [gain for gain in gains if gain > 0]  # they fall
        if sum(gains) <= self._wait:
            return []
        if not sequence.num_unanswered:
            self._left -= len(gains)
        return history.expect(len(gains))


def find_room(pool: BlockPool, sequence: Sequence, num_running: int, rope_switch_len: int) -> int:
    """Most drafts for a sequence that decodes: within its limits, and within blocks that it has or that are
    free beside one for each running sequence, so that nobody else is in want of them."""
    limit = sequence.max_tokens - 1  # the last token is never computed
    if rope_switch_len and not sequence.is_long:
        limit = min(limit, rope_switch_len)
    num_blocks = max(len(sequence.block_table), pool.blocks_for(sequence.num_tokens))
    num_blocks += max(pool.num_free - num_running, 0)
    return min(limit, num_blocks * pool.block_size) - sequence.num_tokens
