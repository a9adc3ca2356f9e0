"""Injects faults at named points in the code, for tests; inactive unless the option `failpoints` names some.

Its rules `POINT[FACT;FACT]=ACTION:SECONDS@TIME`, separated by commas, run when the process reaches the point
and all facts hold, only for the TIME-th time if TIME is given. Facts, seconds and TIME are optional."""

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tgis.errors import OperatorError

ACTIONS = ("raise", "sleep", "kill", "exit", "oom", "garbage")
EXIT_CODE = 3
_RULE = re.compile(
    r"(?P<point>[a-z_.]+)(?:\[(?P<facts>[^]]*)\])?=(?P<action>[a-z]+)(?::(?P<seconds>[\d.]+))?(?:@(?P<time>\d+))?"
)


class FailpointError(OperatorError):
    """Error when the option cannot be parsed; the text is one line."""


class InjectedError(Exception):
    """Error that the action `raise` raises."""


@dataclass
class _Rule:
    facts: frozenset[str]
    action: str
    seconds: float
    turn: int | None
    """Number of the hit at which the rule acts, from 1; None: every hit."""
    num_hits: int = 0

    def applies(self, facts: frozenset[str]) -> bool:
        if not self.facts <= facts:
            return False
        self.num_hits += 1
        return self.turn in (None, self.num_hits)


_rules: dict[str, list[_Rule]] = {}
_own_facts: frozenset[str] = frozenset()


def arm(text: str | None, *facts: str) -> None:
    """Replace the rules by those in `text`; `facts` hold for this process. Raises FailpointError."""
    global _own_facts
    read = [_read(part.strip()) for part in (text or "").split(",") if part.strip()]
    _rules.clear()
    _own_facts = frozenset(facts)
    for point, rule in read:
        _rules.setdefault(point, []).append(rule)


def hit(point: str, facts: Callable[[], list[str]] = list) -> bool:
    """Run the point's rules, if it has any, with `facts`; return True if the caller must produce garbage."""
    if not _rules or point not in _rules:
        return False
    known = _own_facts | frozenset(facts())
    active = [rule for rule in _rules[point] if rule.applies(known)]
    for rule in active:
        _run(rule)
    return any(rule.action == "garbage" for rule in active)


def _read(text: str) -> tuple[str, _Rule]:
    found = _RULE.fullmatch(text)
    if found is None or found["action"] not in ACTIONS:
        raise FailpointError(f"failpoints: {text!r} is not POINT[FACTS]=ACTION:SECONDS@TIME")
    facts = frozenset(fact for fact in (found["facts"] or "").split(";") if fact)
    turn = int(found["time"]) if found["time"] else None
    return found["point"], _Rule(facts, found["action"], float(found["seconds"] or 0), turn)


def _run(rule: _Rule) -> None:
    match rule.action:
        case "raise":
            raise InjectedError
        case "oom":
            raise MemoryError
        case "sleep":
            time.sleep(rule.seconds)
        case "exit":
            os._exit(EXIT_CODE)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
