"""Results of the cases. Each is appended to one file and flushed to the disk at once, so that nothing is lost
if a later measurement fails, time runs out or the machine is taken away. Nothing is ever erased."""

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
    """Which run of this case it is, from 1."""
    kind: Kind
    """A figure has a number and perhaps a prediction; a check holds or not; a problem is what could not be
    measured; a fact is about the machine; an outcome says how the case ended, and is its last result."""
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
    """Appends the results of one case to the file."""

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
        # It begins a line of its own, even if the record before was cut off.
        line = f"\n{json.dumps(asdict(result))}\n".encode()
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line)
            os.fsync(file)
        finally:
            os.close(file)


def read_results(path: Path) -> Iterator[Result]:
    """Yield all results of the file, without records that were cut off."""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield Result(**json.loads(line))
        except (ValueError, TypeError):
            continue


def keep_last_attempts(results: Iterable[Result]) -> list[Result]:
    """Return the results of the last attempt at each case, in the order of the cases. An attempt that was not
    begun takes the place of none."""
    attempts: dict[tuple[str, str], dict[int, list[Result]]] = {}
    for each in results:
        attempts.setdefault((each.stage, each.case), {}).setdefault(each.attempt, []).append(each)
    kept = []
    for by_number in attempts.values():
        begun = [number for number, found in by_number.items() if found[-1].value != NOT_BEGUN]
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
    """Return the last value of a figure, None if it was not measured."""
    values = [each.value for each in read_results(path) if each.kind == "figure" and each.key == key]
    return float(values[-1]) if values and values[-1] is not None else None
