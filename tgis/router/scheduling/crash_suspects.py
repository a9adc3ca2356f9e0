"""Who may have killed the shards. Suspects are computed again one by one, each alone, so that one that kills
them every time is found out and nobody else ends with it."""

from collections import deque
from collections.abc import Sequence as AnySequence

from tgis.router.sequence import Sequence

MAX_FATAL_STEPS = 2
"""After as many in a row, alone in each, a sequence is the culprit."""


class Quarantine:
    """The suspects, in the order of their trials: the newest first, for it is the likeliest."""

    def __init__(self) -> None:
        self._suspects: deque[Sequence] = deque()

    @property
    def next(self) -> Sequence | None:
        """Whose turn it is to be computed, and nobody else's."""
        return self._suspects[0] if self._suspects else None

    def take(self, sequences: AnySequence[Sequence]) -> Sequence | None:
        """The shards died of a step of these, oldest first. Gives the one that is not to be tried again; the
        others are cleared with that."""
        if len(sequences) == 1:
            [alone] = sequences
            alone.num_fatal_steps += 1
            if alone.num_fatal_steps == MAX_FATAL_STEPS:
                self._suspects.clear()
                return alone
        earlier = [suspect for suspect in self._suspects if suspect not in sequences]
        self._suspects = deque([*reversed(sequences), *earlier])
        return None

    def clear(self, sequence: Sequence) -> None:
        """It has got its next token, or has ended."""
        sequence.num_fatal_steps = 0
        if self._suspects and sequence in self._suspects:
            self._suspects.remove(sequence)
