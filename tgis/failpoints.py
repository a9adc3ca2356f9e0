"""Injects faults at named points in the code, for tests; inactive unless the option `failpoints` names some.

The option has rules `POINT[FACT;FACT]=ACTION:SECONDS@TIME`, separated by commas. A rule runs when the process
reaches POINT and all facts hold. Facts, SECONDS and TIME are optional; with TIME, only the TIME-th such hit
runs the rule."""

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
    hit_number: int | None
    """Number of the hit at which the rule acts, from 1; None: every hit."""
    num_hits: int = 0

    def applies(self, facts: frozenset[str]) -> bool:
        if not self.facts <= facts:
            return False
        self.num_hits += 1
        return self.hit_number in (None, self.num_hits)


_rules: dict[str, list[_Rule]] = {}
_own_facts: frozenset[str] = frozenset()


def arm(text: str | None, *facts: str) -> None:
    """Replace all rules with the rules in `text`; `facts` hold for this process. Raises FailpointError."""
    global _own_facts
    parsed = [_parse(part.strip()) for part in (text or "").split(",") if part.strip()]
    _rules.clear()
    _own_facts = frozenset(facts)
    for point, rule in parsed:
        _rules.setdefault(point, []).append(rule)


def hit(point: str, facts: Callable[[], list[str]] = list) -> bool:
    """Run the point's rules that match `facts`. Return True if the caller must produce garbage."""
    if not _rules or point not in _rules:
        return False
    current_facts = _own_facts | frozenset(facts())
    active = [rule for rule in _rules[point] if rule.applies(current_facts)]
    for rule in active:
        _run(rule)
    return any(rule.action == "garbage" for rule in active)


def _parse(text: str) -> tuple[str, _Rule]:
    match = _RULE.fullmatch(text)
    if match is None or match["action"] not in ACTIONS:
        raise FailpointError(f"failpoints: {text!r} is not POINT[FACTS]=ACTION:SECONDS@TIME")
    facts = frozenset(fact for fact in (match["facts"] or "").split(";") if fact)
    hit_number = int(match["time"]) if match["time"] else None
    return match["point"], _Rule(facts, match["action"], float(match["seconds"] or 0), hit_number)


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
