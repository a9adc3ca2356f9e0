"""`python -m bench.gpu` where there is no GPU: a rehearsal runs its sections, results survive a section that
dies, and gates are judged as they are written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.predictions import PREDICTIONS, Prediction
from bench.gpu.report import find_failures, format_report
from bench.gpu.results import Recorder, Result, find_figure, read_results
from bench.gpu.roofline import Rates, decode_seconds, prefill_operations, weight_bytes
from bench.gpu.target import SHAPES


def run(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "bench.gpu", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def test_limits_are_rehearsed(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    done = run("--rehearse", "--only", "limits", "--results", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert find_figure(path, "gemm bf16") is not None
    assert "| limits | read bandwidth" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("section", ["compile", "kernels", "engine", "speed", "service", "peers"])
def test_all_sections_are_rehearsed(section: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    done = run("--rehearse", "--only", f"limits,{section}", "--results", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [each for each in read_results(path) if each.section == section]


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run("--only", "limits", "--results", str(tmp_path / "results.jsonl"))
    assert done.returncode == 1
    assert "limits: exit" in done.stderr


def test_no_section_begins_after_the_budget(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert run("--only", "limits", "--budget", "1", "--results", str(path)).returncode == 1
    assert [each.detail for each in read_results(path)] == ["not begun: the budget is used up"]


def test_an_unknown_section_is_refused() -> None:
    assert "no section nothing" in run("--only", "nothing").stderr


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


def test_failures_are_named(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    recorder = Recorder("speed", path)
    recorder.figure("idle between steps", 0.2, "")
    recorder.figure("0.6b decode 1", 1.0, "ms")
    recorder.check("bits are equal", False)
    recorder.problem("exit", "ended with status 1")
    results = list(read_results(path))
    failures = ["speed: idle between steps misses its gate", "speed: bits are equal", "speed: exit"]
    assert list(find_failures(results, PREDICTIONS)) == failures
    report = format_report(results, ["speed", "peers"], PREDICTIONS)
    assert "| speed | 0.6b decode 1 | 1 ms | 0.9 to 1.4 | at most 1.5 (1.1) | met |" in report
    assert "- peers: no result" in report


def test_results_are_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Recorder("limits", path).figure("gemm bf16", 700.0, "TFLOP/s", "random")
    assert Result(**json.loads(path.read_text())) == Result(
        "limits", "figure", "gemm bf16", 700.0, "TFLOP/s", "random"
    )


def test_floors_of_an_8b_model() -> None:
    """Worked out by hand: 15.0 GB of weights, 3.5 ms for one stream, 132 TFLOP for a prompt."""
    shape, rates = SHAPES["8b"], Rates(4.3e12, 780e12)
    assert weight_bytes(shape) == pytest.approx(15.0e9, rel=0.01)
    assert decode_seconds(shape, 1, 640, rates) == pytest.approx(3.51e-3, rel=0.01)
    assert decode_seconds(shape, 256, 640, rates) == pytest.approx(9.98e-3, rel=0.02)
    assert prefill_operations(shape, 8192) == pytest.approx(132e12, rel=0.01)
