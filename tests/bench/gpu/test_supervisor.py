"""A run on a GPU keeps the results of every case, whatever ends the case."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.gpu.course.case import Case, Stage
from bench.gpu.course.supervisor import Course
from bench.gpu.results import Recorder, keep_last_attempts, read_results
from tests.support.gpu_cases import make_case, run_cases
from tests.support.gpu_faults import FIGURE

# Benches are no part of the service: make test-all runs their tests.
pytestmark = pytest.mark.slow

ENDS = {
    "work": ("done", ""),
    "exhaust_resources": ("failed", "OutOfResources: out of resource: shared memory"),
    "fail_to_compile": ("failed", "CompilationError: at "),
    "fail_an_assertion": ("failed", "AssertionError: 3 of 4 rows differ"),
    "leave": ("failed", "ended with status 7"),
    "break_memory": ("crashed", "SIGSEGV"),
    "import_nothing": ("failed", "ModuleNotFoundError: No module named 'a_module_that_nobody_has'"),
    # The last one, because it ends the process with the libraries.
    "end_the_keeper": ("crashed", "the process that keeps cases is lost"),
}


def test_all_outcomes_are_recorded(tmp_path: Path) -> None:
    cases = {name: make_case(name) for name in ENDS}
    cases["import_nothing"] = Case("import_nothing", "a_module_that_nobody_has:run", 20.0)
    results = run_cases(tmp_path, [*cases.values()], libraries=["torch", "triton"])
    for name, (outcome, reason) in ENDS.items():
        *before, last = results[name]
        assert (last.kind, last.value) == ("outcome", outcome), name
        assert last.detail.startswith(reason), name
        has_begun = name != "import_nothing"
        assert [(each.key, each.value) for each in before] == [(FIGURE, 1.0)] * has_begun, name
    assert "in break_memory" in results["break_memory"][-1].detail
    assert "what it printed" in results["fail_an_assertion"][-1].detail
    assert "what it printed" in (tmp_path / "logs.txt").read_text()


def test_outcomes_of_hanging_cases_are_recorded(tmp_path: Path) -> None:
    cases = [make_case("hang", 1.2), make_case("import_slowly", 1.2)]
    results = run_cases(tmp_path, cases, num_parallel=2)
    assert [(each.key, each.value) for each in results["hang"][:-1]] == [(FIGURE, 1.0)]
    assert results["import_slowly"][:-1] == []
    for name in ("hang", "import_slowly"):
        last = results[name][-1]
        assert (last.kind, last.value) == ("outcome", "out of time")
        assert last.detail.startswith("ended after 1.2 s")
        assert f"in {name}" in last.detail, "where it hangs"
    assert "time.sleep" not in results["hang"][-1].detail
    assert "what its service logged" in results["hang"][-1].detail


def test_leftover_processes_are_ended(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    results = run_cases(tmp_path, [make_case("leave_services", 20.0, str(pids))])
    last = results["leave_services"][-1]
    assert (last.value, last.detail) == ("done", "2 processes were left behind, and are ended")
    left = [int(text) for text in pids.read_text().split()]
    assert len(left) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in left)


def test_cases_without_time_are_not_begun_and_begin_if_the_budget_lasts(tmp_path: Path) -> None:
    cases = [make_case("hang", 1.0), make_case("work")]
    results = run_cases(tmp_path, cases, seconds=1.0)
    assert [each.value for each in results["work"]] == ["not begun", 1.0, "done"]
    assert [each.attempt for each in results["work"]] == [1, 2, 2]


def test_the_pace_scales_all_times(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    course = Course(results, tmp_path / "logs.txt", "cpu", pace=0.1)
    stages = [
        Stage("first", 100.0, (make_case("hang", 6.0),)),
        Stage("last", 8.0, (make_case("hang", 90.0),)),
    ]
    course.run(stages, 60.0)
    endings = [each.detail.partition("\n")[0] for each in read_results(results) if each.kind == "outcome"]
    assert endings == ["ended after 0.6 s", "ended after 0.8 s"]


def test_a_budget_ends_everything(tmp_path: Path) -> None:
    began = time.monotonic()
    results = run_cases(tmp_path, [make_case("hang"), make_case("work")], budget=1.2)
    assert time.monotonic() - began < 30
    assert [each.value for each in results["hang"]] == [1.0, "out of time"]
    assert [each.value for each in results["work"]] == ["not begun"]


@pytest.mark.parametrize("library", ["tests.support.slow_module", "a_module_that_nobody_has"])
def test_a_library_that_cannot_be_imported_is_left_to_the_cases(library: str, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    course = Course(results, tmp_path / "logs.txt", "cpu", import_s=1.0)
    course.run([Stage("faults", 60.0, (make_case("work", 60.0),), libraries=(library,))], 60.0)
    assert [each.value for each in read_results(results)] == [1.0, "done"]


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def list_children(pid: int) -> list[int]:
    """Return the processes below one, according to the kernel."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    children = [int(word) for text in texts for word in text.split()]
    return children + [each for child in children for each in list_children(child)]


def is_alive(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and ") Z " not in path.read_text()


def test_nothing_is_left_of_a_run_that_is_killed(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from tests.support.gpu_cases import make_case, run_cases
run_cases(Path({str(tmp_path)!r}), [make_case("hang", 500.0)])
"""
    run = subprocess.Popen([sys.executable, "-c", program])
    results = tmp_path / "results.jsonl"
    wait_until(lambda: results.exists())
    below = list_children(run.pid)
    assert len(below) == 3, "the process that forks, the keeper, the case"
    run.send_signal(signal.SIGKILL)
    run.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in below))
    assert [each.kind for each in read_results(results)] == ["figure"]


def test_a_record_that_was_cut_off_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    recorder = Recorder("limits", "copies", 1, path)
    recorder.figure("copy bandwidth", 4.0, "TB/s")
    with path.open("a") as file:
        file.write('{"stage": "limits", "ca')
    recorder.outcome("done", 1.0)
    assert [each.kind for each in read_results(path)] == ["figure", "outcome"]


def test_the_last_attempt_that_began_counts(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for attempt, outcome in enumerate(["failed", "done", "not begun"], 1):
        Recorder("limits", "copies", attempt, path).outcome(outcome, 1.0)
    Recorder("limits", "launches", 1, path).outcome("not begun", 0.0)
    kept = keep_last_attempts(read_results(path))
    assert [(each.case, each.attempt) for each in kept] == [("copies", 2), ("launches", 1)]


def test_cases_are_fresh_processes_once_one_cannot_use_the_gpu(tmp_path: Path) -> None:
    results = run_cases(tmp_path, [make_case("need_a_fresh_process"), make_case("need_a_fresh_process_too")])
    first, second = results.values()
    assert [each.value for each in first] == ["failed", 1.0, "done"]
    assert [each.value for each in second] == [1.0, "done"]
