"""Runs a process that measures on demand, so that several can take turns and none is affected by the threads
or memory of another. The child's side needs only the standard library."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.service import BenchError

STOP_TIMEOUT_S = 20.0
ROOT = Path(__file__).parent.parent


class Worker:
    """Worker that replies to a JSON object with a JSON object."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]"):
        self.name, self._process = name, process
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, question: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a job, and return the reply. Raises BenchError if the worker fails or takes longer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the worker has failed, as the missing reply shows
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise BenchError(f"{self.name} did not answer within {timeout:.0f} s") from None
        if not line:
            raise BenchError(f"{self.name} failed with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """Close the worker's stdin; kill it if it does not end in time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(STOP_TIMEOUT_S)
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"{"):  # libraries may print while they are loaded
                self._lines.put(line)
        self._lines.put(b"")


@contextmanager
def start(
    module: str,
    *arguments: str,
    python: str | Path = sys.executable,
    log: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Worker]:
    """Run `python -m module arguments` for the duration of the block, with `env` added to this environment.
    Other output goes to `log`, or to this process's stderr."""
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(log.open("ab")) if log else None
        process = subprocess.Popen(
            [str(python), "-m", module, *arguments],
            cwd=ROOT,
            env=os.environ | dict(env or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            # An interrupt at the terminal must reach only this process.
            start_new_session=True,
        )
        child = Worker(module, process)
        stack.callback(child.stop)
        yield child


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Run the child's side: print one reply per line until stdin ends. Other output, also of libraries not
    written in Python, goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
