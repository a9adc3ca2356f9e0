"""Runs a measurement in a separate process, so that it is not affected by threads or memory of another."""

import json
import subprocess
import sys
from dataclasses import asdict, is_dataclass
from typing import Any

from bench.service import BenchError


def run_child(module: str, job: Any, timeout: float) -> list[dict[str, Any]]:
    """Run `python -m module` with the dataclass `job` on stdin, and return the JSON objects that it prints,
    one per line.

    After `timeout` seconds the process is killed; lines printed before are returned. Raises BenchError if it
    fails or prints nothing."""
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
    """# output that was read up to a timeout is bytes"""
    return output.decode() if isinstance(output, bytes) else output or ""
