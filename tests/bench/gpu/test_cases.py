"""Cases of a run on a GPU, on a device that refuses to capture, and with tools that report planted errors."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton

from bench.gpu.cases import sanitizer, speed, steps
from bench.gpu.inputs import runners
from bench.gpu.inputs.compilations import count_compilations
from bench.gpu.results import Recorder, read_results
from bench.gpu.target import Target
from tests.support.cuda.late_device import LateDevice, LateGraph
from tests.support.cuda.toy_kernels import multiply
from tgis.shard.kernels.cuda.offline.driver import compile_only

# Benches are no part of the service: make test-all runs their tests.
pytestmark = pytest.mark.slow

REASON = "operation not permitted when stream is capturing"


class Refusing(LateDevice):
    def capture(self, work: Callable[[], None]) -> LateGraph:
        raise RuntimeError(f"{REASON}\nand advice")


def make_target(tmp_path: Path, device_type: str = "cpu") -> Target:
    recorder = Recorder("speed", "case", 1, tmp_path / "results.jsonl")
    return Target(device_type, 30.0, recorder, recorder.path, time.monotonic())


def test_steps_that_cannot_be_captured_are_measured_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "make_stream", lambda target: Refusing())
    target = make_target(tmp_path)
    speed.measure_decodes(target, "8b")
    results = {each.key: each for each in read_results(target.path)}
    captured = results["8b decode 1: steps are captured"]
    assert (captured.value, captured.detail) == (False, REASON)
    assert results["8b decode 1, eager: share of bandwidth"].value
    assert any(key.startswith("8b decode 1, eager: kernel ") for key in results)


@pytest.mark.slow
def test_steps_that_cannot_be_captured_are_compared_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "make_stream", lambda target: Refusing())
    target = make_target(tmp_path)
    steps.compare_captured(target, "8b")
    values = {each.key: each.value for each in read_results(target.path)}
    assert values["8b: steps of 2 rows are captured"] is False
    assert values["8b: 4 eager steps, ahead and one by one"] is True


def test_code_that_is_compiled_again_is_counted(tmp_path: Path) -> None:
    x = torch.empty(64, 64, device="meta", dtype=torch.float16)
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope(), compile_only(90):
        triton.knobs.cache.dir = str(tmp_path)
        counts = []
        for _ in range(2):
            counts.append(count_compilations())
            triton.jit(multiply)[1,](x, x, x, 64, 64, 64)
    assert list(map(str, counts)) == ["1 new, 0 found", "0 new, 1 found"]


SUMMARIES = {
    "========= ERROR SUMMARY: 0 errors": ("check", True),
    "========= ERROR SUMMARY: 3 errors": ("check", False),
    "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)": ("check", False),
    "Segmentation fault": ("problem", None),
}


@pytest.mark.parametrize("summary", SUMMARIES)
def test_summaries_of_the_sanitizer(summary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\necho '{summary}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sanitizer.run_tool(make_target(tmp_path, "cuda"), "memcheck")
    [result] = read_results(tmp_path / "results.jsonl")
    assert (result.kind, result.value) == SUMMARIES[summary]
