"""Queries llama.cpp, in the environment of `make bench-peers`, about a GGUF file."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3] / ".cache" / "peers" / "llama-cpp"
WORKER = Path(__file__).with_name("worker.py")


def find_python() -> Path:
    """Return its Python. Skip the test if it is not installed."""
    if not (ROOT / "made.json").is_file():
        pytest.skip(f"llama.cpp is not in {ROOT}; `make bench-peers BENCH=--gguf` installs it")
    return ROOT / "bin" / "python"


def ask(python: Path, file: Path, **asked: Any) -> dict[str, Any]:
    """Return the worker's answers to `texts`, `prompts` with `num_tokens`, and `scored`."""
    command = [str(python), str(WORKER), str(file)]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result
