"""One measurement in a process of its own, so that none finds the threads or the memory of another."""

import json
import subprocess
import sys
from dataclasses import asdict, is_dataclass
from typing import Any

from bench.service import BenchError


def run_child(module: str, job: Any, timeout: float) -> list[dict[str, Any]]:
    """The JSON objects that `python -m module` prints, one a line, given the dataclass `job` on stdin. After
    `timeout` seconds it is killed; what it has printed counts. Raises BenchError where it fails or prints
    nothing."""
    text = json.dumps(asdict(job)) if is_dataclass(job) and not isinstance(job, type) else ""
    command = [sys.executable, "-m", module]
    try:
        done = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        output, status = _as_text(error.stdout), 0
    else:
        output, status = done.stdout, done.returncode
    lines = [line for line in output.splitlines(keepends=True) if line.endswith("}\n")]
    if status != 0 or not lines:
        raise BenchError(f"{' '.join(command)} failed with status {status}")
    return [json.loads(line) for line in lines]


def _as_text(output: bytes | str | None) -> str:
    """What was read up to a timeout comes as bytes."""
    return output.decode() if isinstance(output, bytes) else output or ""
