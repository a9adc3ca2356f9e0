"""Results of the sections. Each appends what it has measured to one file at once, so that nothing is lost if
a later measurement fails or time runs out."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["figure", "check", "problem", "fact"]


@dataclass(frozen=True)
class Result:
    section: str
    kind: Kind
    """A figure has a number and perhaps a prediction; a check holds or not; a problem is what could not be
    measured; a fact is about the machine."""
    key: str
    value: float | str | bool | None = None
    unit: str = ""
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        return self.kind == "problem" or (self.kind == "check" and self.value is not True)


@dataclass(frozen=True)
class Recorder:
    """Appends the results of one section to the file, and prints them."""

    section: str
    path: Path

    def figure(self, key: str, value: float, unit: str, detail: str = "") -> None:
        self._append(Result(self.section, "figure", key, value, unit, detail))

    def check(self, key: str, holds: bool, detail: str = "") -> None:
        self._append(Result(self.section, "check", key, holds, "", detail))

    def problem(self, key: str, detail: str) -> None:
        self._append(Result(self.section, "problem", key, None, "", detail))

    def fact(self, key: str, value: str) -> None:
        self._append(Result(self.section, "fact", key, value))

    def _append(self, result: Result) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        value = f"{result.value:.4g}" if isinstance(result.value, float) else result.value
        print(f"{self.section}: {result.key} = {value} {result.unit} {result.detail}".rstrip(), flush=True)


def read_results(path: Path) -> Iterator[Result]:
    for line in path.read_text().splitlines() if path.exists() else ():
        yield Result(**json.loads(line))


def find_figure(path: Path, key: str) -> float | None:
    """Return the last value of a figure, None if it was not measured."""
    values = [each.value for each in read_results(path) if each.kind == "figure" and each.key == key]
    return float(values[-1]) if values and values[-1] is not None else None
