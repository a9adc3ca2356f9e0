"""Runs cases of a GPU run without a GPU."""

from collections.abc import Sequence
from pathlib import Path

from bench.gpu.course.case import Case, Stage
from bench.gpu.course.supervisor import Course
from bench.gpu.results import Result, read_results

FAULTS = "tests.support.gpu_faults"


def make_case(function: str, seconds: float = 20.0, *arguments: str) -> Case:
    return Case(function, f"{FAULTS}:{function}", seconds, arguments)


def run_cases(
    tmp_path: Path,
    cases: Sequence[Case],
    num_parallel: int = 1,
    seconds: float = 100.0,
    budget: float = 100.0,
    libraries: Sequence[str] = (),
) -> dict[str, list[Result]]:
    """Run one stage. Return the results of each case."""
    course = Course(tmp_path / "results.jsonl", tmp_path / "logs.txt", "cpu")
    course.run([Stage("faults", seconds, tuple(cases), num_parallel, tuple(libraries))], budget)
    results = list(read_results(tmp_path / "results.jsonl"))
    return {case.name: [each for each in results if each.case == case.name] for case in cases}
