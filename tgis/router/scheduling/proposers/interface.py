"""Proposers of drafts, as the scheduler uses them."""

from typing import Protocol

from tgis.router.scheduling.step import Drafts
from tgis.router.sequence import Sequence


class Proposer(Protocol):
    """Decides for one step after the other which sequences get drafts, and how many."""

    def begin(self, num_sequences: int, most: int) -> bool:
        """Begin a step of `num_sequences` sequences that may have at most `most` drafts together. Return
        False if none of them should have any."""

    def propose(self, sequence: Sequence, most: int) -> Drafts:
        """Return at most `most` drafts of the sequence's next tokens; a negative number allows none.

        Token ids join the step only if no token of the sequence is unanswered, because they follow its last
        one. Otherwise the sequence waits, and is asked again for a later step."""
