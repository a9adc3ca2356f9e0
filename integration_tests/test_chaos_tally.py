"""What chaos counts as lost, broken, refused and wrong."""

import time
from dataclasses import replace

from integration_tests.chaos.losses import Breaks
from integration_tests.chaos.tally import PartyRecord, Tally, count
from tgis.load.records import AnswerRecord

WHOLE = AnswerRecord(3, 0, 0.0, 0.0, 2, [0.1, 0.4], [1, 2], ended=0.5, digest="a", repeats=1)
BROKEN = replace(WHOLE, error="UNAVAILABLE", message="Socket closed")


def tally(*records: AnswerRecord, breaks: Breaks | None = None, start: float = 0.0) -> Tally:
    undisturbed = [replace(WHOLE, index=1, repeats=None)]
    return count([PartyRecord("fmaas", undisturbed, [*records], start)], breaks or Breaks())


def test_answers_are_those_of_before_the_faults() -> None:
    result = tally(WHOLE, replace(WHOLE, is_cancelled=True, digest="b"))
    assert (result.sent, result.answered, result.cancelled, result.wrong) == (2, 1, 1, [])
    assert abs(result.longest_pause_s - 0.3) < 1e-9
    for wrong in (replace(WHOLE, digest="b"), replace(WHOLE, faults=["wrong length"])):
        assert len(tally(WHOLE, wrong).wrong) == 1


def test_refusals_are_not_lost() -> None:
    refusals = (
        ("RESOURCE_EXHAUSTED", "Model is overloaded"),
        ("HTTP 429", '{"error": {"message": "Model is overloaded"}}'),
        ("HTTP 503", '{"code": 503, "type": "WlmCapacityException"}'),
    )
    result = tally(*(replace(WHOLE, error=error, message=message) for error, message in refusals))
    assert (result.refused, result.lost) == (3, [])
    others = (("RESOURCE_EXHAUSTED", "no room"), ("HTTP 503", "starting"), ("ended by cancelled", ""))
    result = tally(*(replace(WHOLE, error=error, message=message) for error, message in others))
    assert (result.refused, len(result.lost)) == (0, 3)


def test_connections_break_only_when_and_as_often_as_allowed() -> None:
    breaks, start = Breaks(), time.monotonic()
    breaks.allow(1)
    breaks.allow(1)
    ended = time.monotonic() - start
    breaks.forbid()
    over_http = replace(BROKEN, error="connection", message="")
    at_once = [replace(one, ended=ended) for one in (BROKEN, over_http, BROKEN)]
    early = replace(BROKEN, ended=-1.0)
    late = replace(BROKEN, ended=time.monotonic() - start + 1.0)
    other = replace(at_once[0], message="the service is draining")
    result = tally(early, other, *at_once, late, breaks=breaks, start=start)
    assert (result.broken, len(result.lost)) == (2, 4)
