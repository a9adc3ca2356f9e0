"""Stores the results of the cases.

Each result is appended to a file and flushed to disk at once, so that nothing is lost if a later measurement
fails, time runs out or the machine is taken away. Nothing is ever erased."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["figure", "check", "problem", "fact", "outcome"]
DONE, FAILED, CRASHED = "done", "failed", "crashed"
OUT_OF_TIME, NOT_BEGUN = "out of time", "not begun"


@dataclass(frozen=True)
class Result:
    stage: str
    case: str
    attempt: int
    """Number of the attempt at this case, from 1."""
    kind: Kind
    """Kind of result. A figure has a number and optionally a prediction; a check passes or fails; a problem
    is a failed measurement; a fact describes the machine; an outcome is the case's last result and has its
    end."""
    key: str
    value: float | str | bool | None = None
    unit: str = ""
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        if self.kind == "outcome":
            return self.value != DONE
        return self.kind == "problem" or (self.kind == "check" and self.value is not True)


@dataclass(frozen=True)
class Recorder:
    """Writer that appends the results of one case to the file."""

    stage: str
    case: str
    attempt: int
    path: Path

    def figure(self, key: str, value: float, unit: str, detail: str = "") -> None:
        self._append("figure", key, value, unit, detail)

    def check(self, key: str, holds: bool, detail: str = "") -> None:
        self._append("check", key, holds, "", detail)

    def problem(self, key: str, detail: str) -> None:
        self._append("problem", key, None, "", detail)

    def fact(self, key: str, value: str) -> None:
        self._append("fact", key, value)

    def outcome(self, value: str, seconds: float, detail: str = "") -> None:
        self._append("outcome", f"{seconds:.1f} s", value, "", detail)

    def _append(
        self, kind: Kind, key: str, value: float | str | bool | None, unit: str = "", detail: str = ""
    ) -> None:
        result = Result(self.stage, self.case, self.attempt, kind, key, value, unit, detail)
        # Each record begins a new line, even if the record before was truncated.
        line = f"\n{json.dumps(asdict(result))}\n".encode()
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line)
            os.fsync(file)
        finally:
            os.close(file)


def read_results(path: Path) -> Iterator[Result]:
    """Yield all results of the file, except truncated records."""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield Result(**json.loads(line))
        except (ValueError, TypeError):
            continue


def keep_last_attempts(results: Iterable[Result]) -> list[Result]:
    """Return the results of the last attempt at each case, in the order of the cases. An attempt that was not
    started replaces no other."""
    attempts: dict[tuple[str, str], dict[int, list[Result]]] = {}
    for each in results:
        attempts.setdefault((each.stage, each.case), {}).setdefault(each.attempt, []).append(each)
    kept = []
    for by_number in attempts.values():
        begun = [number for number, of_attempt in by_number.items() if of_attempt[-1].value != NOT_BEGUN]
        kept += by_number[max(begun or by_number)]
    return kept


def count_attempts(results: Iterable[Result]) -> dict[tuple[str, str], int]:
    """Return the number of the last attempt at each case."""
    counts: dict[tuple[str, str], int] = {}
    for each in results:
        key = each.stage, each.case
        counts[key] = max(each.attempt, counts.get(key, 0))
    return counts


def find_figure(path: Path, key: str) -> float | None:
    """Return the last value of a figure; None if it was not measured."""
    values = [each.value for each in read_results(path) if each.kind == "figure" and each.key == key]
    return float(values[-1]) if values and values[-1] is not None else None
