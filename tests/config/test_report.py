"""The output of `--env` and `tgis env`."""

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tgis.config import report
from tgis.config.checks import Setting


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tgis", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})})


def test_the_command_prints_and_ends() -> None:
    env = {"PORT": "3001", "HF_TOKEN": "hf_s3cret", "OTLP_ENDPOINT": "http://me:s3cret@collector:4317"}
    result = run("env", "--grpc-port", "8034", env=env)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    for name in ("torch", "transformers", "tokenizers", "grpcio", "llguidance"):
        assert f"  {name}: {version(name)}" in lines
    assert f"  python: {platform.python_version()} ({sys.executable})" in lines
    assert "  port: 3001 (PORT)" in lines
    assert "  grpc_port: 8034 (--grpc-port)" in lines
    assert "  max_batch_size: 256 (default)" in lines
    assert "  HF_TOKEN: (hidden)" in lines
    assert "  otlp_endpoint: http://(hidden)@collector:4317 (OTLP_ENDPOINT)" in lines
    assert "s3cret" not in result.stdout + result.stderr


def test_the_flag_prints_and_goes_on(tmp_path: Path) -> None:
    log = ["--termination-log", str(tmp_path / "log")]
    for flag in ("--env", "-e"):
        result = run("launcher", flag, "--model-name", str(tmp_path), *log, env={"ENV": "production"})
        assert result.returncode == 1
        assert result.stdout == ""
        assert f"  model_name: {tmp_path} (--model-name)" in result.stderr
        assert result.stderr.splitlines()[-1].startswith("error: Failed to resolve config path: ")


def test_it_loads_none_of_the_libraries_it_names() -> None:
    code = (
        "import sys; from tgis.config import report; report.describe({});"
        "print([name for name in ('torch', 'transformers', 'tokenizers', 'numba') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_the_machine_as_its_files_describe_it(tmp_path: Path) -> None:
    for name, text in {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Test CPU 9000\n",
        "proc/meminfo": "MemTotal:  16384 kB\nMemAvailable:  8192 kB\n",
        "sys/fs/cgroup/memory.max": "1073741824\n",
        "sys/fs/cgroup/cpu.max": "150000 100000\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    lines = report.describe({}, tmp_path).splitlines()
    assert "  cpu: Test CPU 9000" in lines
    assert "  memory: 8192 kB available of 16384 kB" in lines
    assert "  cgroup memory.max: 1073741824" in lines
    assert "  cgroup cpu.max: 150000 100000" in lines


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("echo 'NVIDIA H100, 81559 MiB, 570.1, 9.0'", "  cuda 0: NVIDIA H100, 81559 MiB, 570.1, 9.0"),
        ("echo 'no driver' >&2; exit 9", "  cuda: none (nvidia-smi exited with 9)"),
        (None, "  cuda: none (no nvidia-smi)"),
    ],
)
def test_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, line: str) -> None:
    if script:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(report, "KERNEL_CHECK", ["false"])
    assert line in report.describe({}).splitlines()


def test_a_value_cannot_forge_a_line() -> None:
    text = report.describe({"model_name": Setting("x\n  port: 1 (--port)", "--model-name")})
    assert "\n  port: 1" not in text


@pytest.fixture
def _gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho GPU\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        (
            "import json; print(json.dumps({'cuda 0': {}, 'cuda 1': {'gate': 'it differs by 3'}}))",
            ["cuda 0: all pass the check", "cuda 1: 1 replaced", "cuda 1 gate: replaced: it differs by 3"],
        ),
        ("raise SystemExit('no triton')", ["check: failed (exited with 1: no triton)"]),
        ("import time; time.sleep(60)", ["check: failed (TimeoutExpired)"]),
    ],
)
@pytest.mark.usefixtures("_gpu")
def test_kernels_are_checked_in_a_process_of_their_own(
    monkeypatch: pytest.MonkeyPatch, code: str, lines: list[str]
) -> None:
    monkeypatch.setattr(report, "KERNEL_CHECK", [sys.executable, "-c", code])
    monkeypatch.setattr(report, "KERNEL_CHECK_TIMEOUT_S", 2.0)
    report_lines = report.describe({}).splitlines()
    begin = report_lines.index("kernels:") + 1
    assert report_lines[begin : begin + len(lines)] == [f"  {line}" for line in lines]


@pytest.mark.usefixtures("_gpu")
def test_the_check_runs_here_and_finds_no_gpu() -> None:
    """If there is a GPU, its kernels are reported."""
    assert "check: failed" not in report.describe({})


def test_no_kernels_are_checked_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "kernels:" not in report.describe({}).splitlines()
