"""Interface of draft proposers."""

from collections.abc import Iterable
from typing import Protocol

from tgis.router.scheduling.step import DraftResult, Drafts, Step
from tgis.router.sequence import Sequence


class Proposer(Protocol):
    """Decides for each step which sequences get drafts, and how many."""

    def begin(self, num_sequences: int, max_drafts: int) -> bool:
        """Begin a step of `num_sequences` sequences with at most `max_drafts` drafts in total. Return False
        if none of them should get drafts."""

    def propose(self, sequence: Sequence, max_drafts: int) -> Drafts:
        """Return at most `max_drafts` drafts of the sequence's next tokens; a negative number allows none.

        Token ids are part of the step only if the sequence has no unanswered token, because they follow its
        last token. Otherwise the sequence waits, and this is called again for a later step."""

    def follows(self, sequence: Sequence, num_sequences: int) -> bool:
        """Return True if the shards' speculator must follow a sequence from its admission on, as one of
        `num_sequences`. It proposes drafts only for such sequences."""

    def observe(self, step: Step, results: Iterable[DraftResult], seconds: float, follow_s: float) -> None:
        """Learn from the results of an answered step, which the shards computed in `seconds`, including the
        `follow_s` in which their speculator followed it."""
