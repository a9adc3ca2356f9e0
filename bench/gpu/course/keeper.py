"""Keeps one case: starts it, waits for its end or its time limit, ends all processes that it has started, and
records the outcome.

The keeper computes nothing itself, so no fault of a case ends it."""

import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from bench.gpu.course.case import Job, find_function
from bench.gpu.course.processes import POLL_S, adopt_orphans, end_descendants
from bench.gpu.results import CRASHED, DONE, FAILED, OUT_OF_TIME, Recorder

MAX_TAIL = 3000  # characters of the log in an outcome
MAX_REASON = 1000
TRACE_S = 0.5  # before its end, a hung case writes its stack to the log


def keep(job: Job, is_forked: bool) -> None:
    """Run a case in a process forked from this one, or in a new one. Return when its outcome is on disk."""
    adopt_orphans()
    directory = Path(tempfile.mkdtemp(prefix="case-", dir=Path(job.log).parent))
    began = time.monotonic()
    try:
        parent = os.getppid()
        pid = _fork(job, directory) if is_forked else _spawn(job, directory)
        status = _wait(pid, began + job.seconds, parent)
        seconds, num_left = time.monotonic() - began, end_descendants()
        if os.getppid() == parent:  # otherwise results recorded now would not be counted
            _record(job, directory, status, seconds, num_left)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _fork(job: Job, directory: Path) -> int:
    pid = os.fork()
    if pid == 0:
        run_case(job, directory)
    return pid


def _spawn(job: Job, directory: Path) -> int:
    command = [sys.executable, "-m", "bench.gpu.course.keeper", json.dumps(asdict(job)), str(directory)]
    return os.posix_spawn(sys.executable, command, os.environ)


def _wait(pid: int, end: float, parent: int) -> int | None:
    """Return the status of a process, as os.waitpid does, or None if it does not end in time."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() >= end or os.getppid() != parent:
            return None
        time.sleep(POLL_S)


def _record(job: Job, directory: Path, status: int | None, seconds: float, num_left: int) -> None:
    value, detail = _describe(job, directory, status)
    if status is not None and num_left:
        detail = "; ".join(filter(None, [detail, f"{num_left} processes were left behind, and are ended"]))
    if value != DONE:
        for log in directory.rglob("*.log"):  # of services
            tail = f"end of {log.name}:\n{read_tail(log)}\n"
            with Path(job.log).open("a") as file:
                file.write(tail)
        detail += f"\n{read_tail(Path(job.log))}"
    Recorder(job.stage, job.case, job.attempt, Path(job.results)).outcome(value, seconds, detail.strip())


def _describe(job: Job, directory: Path, status: int | None) -> tuple[str, str]:
    """Return the outcome and its reason."""
    if status is None:
        return OUT_OF_TIME, f"ended after {job.seconds:.1f} s"
    if os.WIFSIGNALED(status):
        return CRASHED, signal.Signals(os.WTERMSIG(status)).name
    if status == 0:
        return DONE, ""
    reason = directory / "reason"
    if reason.exists():
        return FAILED, reason.read_text()
    return FAILED, f"ended with status {os.waitstatus_to_exitcode(status)}"


def read_tail(log: Path) -> str:
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - MAX_TAIL))
        return file.read().decode(errors="replace")


def run_case(job: Job, directory: Path) -> NoReturn:
    """Run a case, and end this process."""
    status = 1
    try:
        _prepare(job, directory)
        _call(job)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            _explain(directory, error.code)
    except BaseException as error:
        traceback.print_exc()
        first, _, _ = str(error).strip().partition("\n")
        _explain(directory, f"{type(error).__name__}: {first}")
    _flush(sys.stdout.flush, sys.stderr.flush)
    os._exit(status)


def _prepare(job: Job, directory: Path) -> None:
    os.setsid()
    log = os.open(job.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(job.seconds - TRACE_S, job.seconds / 2))


def _call(job: Job) -> None:
    from bench.gpu.target import make_target

    recorder = Recorder(job.stage, job.case, job.attempt, Path(job.results))
    find_function(job.function)(make_target(recorder, job.device, job.seconds), *job.arguments)


def _explain(directory: Path, reason: str) -> None:
    (directory / "reason").write_text(reason[:MAX_REASON])


def _flush(*flushes: Callable[[], None]) -> None:
    for flush in flushes:
        try:
            flush()
        except (OSError, ValueError):  # the case has closed it
            continue


if __name__ == "__main__":
    run_case(Job(**json.loads(sys.argv[1])), Path(sys.argv[2]))
