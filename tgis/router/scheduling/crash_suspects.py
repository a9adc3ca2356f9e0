"""Finds the sequence that kills the shards. Crash suspects are computed again one at a time, each alone, so
that a sequence that kills the shards every time is identified and no other sequence fails with it."""

from collections import deque
from collections.abc import Sequence as AnySequence

from tgis.router.sequence import Sequence

MAX_FATAL_STEPS = 2  # number of consecutive fatal steps, alone in each, that identify the culprit


class CrashSuspects:
    """Crash suspects in the order of their trials. The newest comes first, because it is the most likely
    culprit."""

    def __init__(self) -> None:
        self.queue: deque[Sequence] = deque()
        """Remaining suspects."""

    @property
    def next(self) -> Sequence | None:
        """Suspect that the next step must compute alone, or None."""
        return self.queue[0] if self.queue else None

    def record_crash(self, sequences: AnySequence[Sequence]) -> Sequence | None:
        """Record that a step of these sequences, oldest first, killed the shards. Return the culprit if it is
        known."""
        if len(sequences) == 1:
            [alone] = sequences
            alone.num_fatal_steps += 1
            if alone.num_fatal_steps == MAX_FATAL_STEPS:
                self.queue.clear()
                return alone
        earlier = [suspect for suspect in self.queue if suspect not in sequences]
        self.queue = deque([*reversed(sequences), *earlier])
        return None

    def clear(self, sequence: Sequence) -> None:
        """Clear a sequence that has received its next token or has ended."""
        sequence.num_fatal_steps = 0
        if self.queue and sequence in self.queue:
            self.queue.remove(sequence)
