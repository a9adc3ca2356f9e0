"""Counts the answers of the traffic by what became of them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from integration_tests.chaos.losses import Breaks
from tgis.load.apis.channels import UNAVAILABLE
from tgis.load.apis.http import CONNECTION
from tgis.load.figures import SEED_FAULT, find_seed_faults
from tgis.load.records import AnswerRecord

OVERLOADED = re.compile("Model is overloaded|WlmCapacityException")
"""Messages of refusals at the limit of the service; the second is LMI's."""
# gRPC's text for a connection that ends during a call; the service's own statuses differ.
BROKEN = re.compile("Socket closed|[Cc]onnection reset|Broken pipe|Stream removed|[Cc]onnection refused")


@dataclass(frozen=True)
class PartyRecord:
    """Answers to the clients of a party."""

    api: str
    undisturbed: list[AnswerRecord]
    records: list[AnswerRecord]
    start: float
    """Time of the monotonic clock from which the records count."""


@dataclass
class Tally:
    """Results of all clients' calls."""

    sent: int = 0
    answered: int = 0
    cancelled: int = 0
    refused: int = 0
    longest_pause_s: float = 0.0
    broken: int = 0
    """Number of calls lost with the connection to a lost router worker."""
    lost: list[str] = field(default_factory=list)
    """Errors that calls got instead of their response."""
    wrong: list[str] = field(default_factory=list)


def count(parties: Iterable[PartyRecord], breaks: Breaks) -> Tally:
    """Return the results. A call whose connection breaks counts as lost, unless `breaks` allows it."""
    tally = Tally()
    for party in parties:
        for record in party.records:
            _count(party, record, breaks, tally)
        for record in find_seed_faults([*party.undisturbed, *party.records]):
            tally.wrong.append(_describe(party, record, SEED_FAULT))
    return tally


def is_overload(record: AnswerRecord) -> bool:
    return OVERLOADED.search(record.message) is not None


def _count(party: PartyRecord, record: AnswerRecord, breaks: Breaks, tally: Tally) -> None:
    tally.sent += 1
    if record.is_cancelled:
        tally.cancelled += 1
    elif record.error is None:
        tally.answered += 1
        tally.wrong += [_describe(party, record, fault) for fault in record.faults]
        times = pairwise((record.sent, *record.arrivals, record.ended))
        tally.longest_pause_s = max(tally.longest_pause_s, *(after - before for before, after in times))
    elif is_overload(record):
        tally.refused += 1
    elif _is_break(record) and breaks.take(party.start + record.ended):
        tally.broken += 1
    else:
        tally.lost.append(_describe(party, record, f"{record.error} {record.message}"))


def _is_break(record: AnswerRecord) -> bool:
    is_status = record.error == UNAVAILABLE and BROKEN.search(record.message) is not None
    return record.error == CONNECTION or is_status


def _describe(party: PartyRecord, record: AnswerRecord, event: str) -> str:
    """Return a line with what is needed to send the conversation again."""
    seconds, tokens = f"{record.total_s:.1f} s", f"{record.output_tokens} of {record.wanted_tokens} tokens"
    return f"{party.api}, conversation {record.content[0]}, after {seconds} and {tokens}: {event}"
