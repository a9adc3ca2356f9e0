"""Checks answers: why and where they end, and whether they follow their constraints."""

from tgis.load.records import AnswerReceiver, Prompting
from tgis.load.workload.constraints import follows

LENGTH, CONSTRAINT = "wrong length", "constraint violated"
NO_END = "no stop reason"
AT_MAXIMUM = ("length", "max_tokens", "token_limit")
BY_MODEL = ("stop", "eos_token", "stop_sequence")
"""Stop reasons of whole texts in the words of all APIs: those that were cut, and those that are complete."""


def find_unexpected_end(prompting: Prompting, receiver: AnswerReceiver) -> str | None:
    """Return the kind of the failure if a text of the call did not end, or ended for a reason that is none
    of a whole text."""
    for number in range(len(prompting.texts)):
        reason = receiver.ends.get(number)
        if reason is None:
            return NO_END
        if reason not in AT_MAXIMUM and reason not in BY_MODEL:
            return f"ended by {reason}"
    return None


def find_faults(prompting: Prompting, receiver: AnswerReceiver) -> list[str]:
    """Return the kinds of checks that a whole answer fails."""
    faults = []
    if not _has_right_length(prompting, receiver):
        faults.append(LENGTH)
    # A text that has reached its maximum may have been cut.
    whole = (number for number, reason in receiver.ends.items() if reason in BY_MODEL)
    rule = prompting.rule
    if rule is not None and not all(follows(rule, receiver.text_of(number)) for number in whole):
        faults.append(CONSTRAINT)
    return faults


def _has_right_length(prompting: Prompting, receiver: AnswerReceiver) -> bool:
    num_tokens = receiver.record.output_tokens
    wanted = prompting.wanted_tokens
    if num_tokens == wanted:
        return True
    was_cut = all(reason in AT_MAXIMUM for reason in receiver.ends.values())
    return num_tokens < wanted and not prompting.is_exact and not was_cut
