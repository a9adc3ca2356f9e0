"""`python -m bench.gpu` without a GPU: a rehearsal takes the planned course, a second run does the rest, and
gates are judged correctly."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.course.case import Case, Stage
from bench.gpu.inputs.roofline import Rates, decode_seconds, prefill_operations, weight_bytes
from bench.gpu.inputs.shapes import SHAPES
from bench.gpu.predictions import PREDICTIONS, Prediction, predict
from bench.gpu.publish import BEGIN, END, PAGE, replace_report
from bench.gpu.report import find_failures, find_unfinished, format_report
from bench.gpu.results import Recorder, find_figure, read_results
from bench.gpu.stages import AGAIN_BUDGET_S, BUDGET_S, FAMILIES, STAGES, VARIANTS
from tests.support.shard.family_cases.all import CASES, family_of, runs_on_gpus

# Benches are no part of the service: make test-all runs their tests.
pytestmark = pytest.mark.slow


def run(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "bench.gpu", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_the_whole_course_is_rehearsed(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    done = run("--rehearse", "--pace", "4", "--results", str(path))
    results = list(read_results(path))
    order = list(dict.fromkeys(each.stage for each in results))
    assert order == [stage.name for stage in STAGES]
    ended = {(each.stage, each.case) for each in results if each.kind == "outcome"}
    assert ended == {(stage.name, case.name) for stage in STAGES for case in stage.cases if case.is_rehearsed}
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "report.md").read_text() in done.stdout


def test_one_stage_is_rehearsed_and_not_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    done = run("--rehearse", "--pace", "4", "--only", "limits", "--results", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert find_figure(path, "gemm bf16") is not None
    assert "| limits | read bandwidth" in done.stdout
    before = path.read_text()
    assert run("--rehearse", "--again", "--only", "limits", "--results", str(path)).returncode == 0
    assert path.read_text() == before


@pytest.mark.slow
def test_without_a_gpu_every_case_says_so(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    done = run("--only", "limits", "--results", str(path))
    assert done.returncode == 1
    assert "limits: launches failed" in done.stderr
    ends = [each for each in read_results(path) if each.kind == "outcome"]
    assert [each.value for each in ends] == ["failed"] * 4
    assert all("CUDA" in each.detail for each in ends)


def test_an_unknown_stage_is_refused() -> None:
    assert "no stage nothing" in run("--only", "nothing").stderr


def test_the_course_is_as_planned() -> None:
    assert sum(stage.seconds for stage in STAGES) == BUDGET_S == 480
    assert AGAIN_BUDGET_S == 240
    assert len(STAGES) == 10
    for stage in STAGES:
        names = [case.name for case in stage.cases]
        assert len(set(names)) == len(names)
        assert all(case.seconds <= stage.seconds for case in stage.cases)
        assert any(case.is_rehearsed for case in stage.cases)


def test_every_family_comes_before_variants() -> None:
    assert sorted((*FAMILIES, *VARIANTS, "gemma_gelu")) == sorted(filter(runs_on_gpus, CASES))
    assert sorted(map(family_of, FAMILIES)) == sorted(set(map(family_of, filter(runs_on_gpus, CASES))))


@pytest.mark.parametrize(
    ("prediction", "value", "is_met"),
    [
        (Prediction(0, 1, gate=0.5), 0.5, True),
        (Prediction(0, 1, gate=0.5), 0.49, False),
        (Prediction(0, 1, gate=0.5, at_most=True), 0.51, False),
        (Prediction(0, 1), 9.0, None),
    ],
)
def test_gates(prediction: Prediction, value: float, is_met: bool | None) -> None:
    assert prediction.is_met(value) is is_met


def test_predictions_are_those_of_the_gpu() -> None:
    assert predict("NVIDIA H200, sm_90")["copy bandwidth"].low == 4.1
    assert predict("NVIDIA H100 80GB HBM3, sm_90")["copy bandwidth"].high == 3.1
    assert predict("NVIDIA L4, sm_89") == {}
    assert PREDICTIONS["H100"].keys() == PREDICTIONS["H200"].keys()


def test_failures_are_named(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    recorder = Recorder("speed", "8b decode", 1, path)
    recorder.figure("idle between steps", 0.2, "")
    recorder.figure("0.6b decode 1", 1.0, "ms")
    recorder.figure("8b decode 64: kernel attend_segments", 80.0, "us", "32 launches")
    recorder.check("bits are equal", False)
    recorder.outcome("crashed", 3.0, "SIGSEGV\nlast words")
    results, predictions = list(read_results(path)), predict("NVIDIA H200")
    failures = [
        "speed: idle between steps misses its gate",
        "speed: bits are equal",
        "speed: 8b decode crashed",
    ]
    assert list(find_failures(results, predictions)) == failures
    report = format_report(results, STAGES, predictions)
    assert "| 0.6b decode 1 | 1 ms | 0.9 to 1.4 | at most 1.5 (1.1) | met |" in report
    assert "| copy bandwidth | unmeasured | 4.1 to 4.4 |  |  |" in report
    assert "| 8b decode 64 | `attend_segments` | 80.0 | 32 launches |" in report
    assert "| speed | 6 | 0 | 1 | 5 | 0 |" in report
    assert "- speed: 8b decode: crashed: SIGSEGV" in report


def test_a_second_run_repeats_failed_and_unfinished_cases(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    cases = {name: Recorder("kernels", name, 1, path) for name in ("good", "wrong", "lost", "hung")}
    cases["good"].check("bits are equal", True)
    cases["wrong"].check("bits are equal", False)
    cases["lost"].figure("seconds", 1.0, "s")
    for name in ("good", "wrong"):
        cases[name].outcome("done", 1.0)
    cases["hung"].outcome("out of time", 9.0)
    stage = Stage("kernels", 9, tuple(Case(name, "a:b", 1) for name in (*cases, "new")))
    [left] = find_unfinished(list(read_results(path)), [stage])
    assert [case.name for case in left.cases] == ["wrong", "lost", "hung", "new"]


def test_a_report_takes_the_place_of_another() -> None:
    page = f"before\n\n{BEGIN}\n\nThere is no report yet.\n\n{END}\nafter\n"
    once = replace_report(page, "first\n")
    assert once == f"before\n\n{BEGIN}\n\nfirst\n\n{END}\nafter\n"
    assert replace_report(once, "second") == once.replace("first", "second")
    assert replace_report(PAGE.read_text(), "third").count("third") == 1


def test_results_are_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Recorder("limits", "products", 2, path).figure("gemm bf16", 700.0, "TFLOP/s", "random")
    assert json.loads(path.read_text()) == {
        "stage": "limits",
        "case": "products",
        "attempt": 2,
        "kind": "figure",
        "key": "gemm bf16",
        "value": 700.0,
        "unit": "TFLOP/s",
        "detail": "random",
    }


def test_floors_of_an_8b_model() -> None:
    """Computed by hand: 15.0 GB of weights, 3.5 ms for one stream, 132 TFLOP for a prompt."""
    shape, rates = SHAPES["8b"], Rates(4.3e12, 780e12)
    assert weight_bytes(shape) == pytest.approx(15.0e9, rel=0.01)
    assert decode_seconds(shape, 1, 640, rates) == pytest.approx(3.51e-3, rel=0.01)
    assert decode_seconds(shape, 256, 640, rates) == pytest.approx(9.98e-3, rel=0.02)
    assert prefill_operations(shape, 8192) == pytest.approx(132e12, rel=0.01)
