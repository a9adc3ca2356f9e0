"""Runs stages of cases within a budget of time. It imports no library that a case needs."""

import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench.gpu.course.case import Case, Job, Stage
from bench.gpu.course.keeper import read_tail
from bench.gpu.results import CRASHED, NOT_BEGUN, Recorder, count_attempts, read_results

# Otherwise libraries would open the GPU to detect it. Each case has cores for a few threads.
ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "2"}
# CUDA's error in a process forked from one that has used it.
FORK_ERRORS = ("re-initialize CUDA in forked", "initialization error", "not initialized")
IMPORT_S = 45.0
GRACE_S = 10.0  # time to write the outcome of a case after its time limit
MIN_CASE_S = 0.5  # a case with less time left is not started


class Forker:
    """Process that forks cases, one at a time. It is restarted when it has ended."""

    def __init__(self, log: Path, libraries: Sequence[str], import_s: float):
        self._log, self._libraries, self._import_s = log, libraries, import_s
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it. A library that is not imported in time, or ends the process, is left to the cases."""
        while self._process is None or self._process.poll() is not None:
            self._spawn(self._libraries)
            for name in self._libraries:
                if not self._is_answering(self._import_s):
                    self.stop()
                    self._libraries = [each for each in self._libraries if each != name]
                    break

    def run(self, job: Job) -> None:
        """Run a case, and stop the process if that fails."""
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(f"{json.dumps(asdict(job))}\n".encode())
            if self._is_answering(job.seconds + GRACE_S):
                return
        self.stop()

    def stop(self) -> None:
        """End the process and all cases below it."""
        if self._process is None:
            return
        self._process.kill()
        self._process.communicate()
        self._process = None

    def _spawn(self, libraries: Sequence[str]) -> None:
        command = [sys.executable, "-m", "bench.gpu.course.forker", *libraries]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**ENVIRONMENT, **os.environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                start_new_session=True,
            )

    def _is_answering(self, seconds: float) -> bool:
        """Return True once it has replied, or False after `seconds`."""
        assert self._process is not None
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        return bool(ready and self._process.stdout.readline())


@dataclass
class Course:
    """One run of stages. Results are appended to `results`, output of cases to `logs`."""

    results: Path
    logs: Path
    device: str
    pace: float = 1.0
    """Factor of all time limits."""
    import_s: float = IMPORT_S
    report: Callable[[str], None] = print
    is_forking: bool = True
    """False once a case has shown that forked processes cannot use the GPU."""
    _forkers: list[Forker] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, stages: Iterable[Stage], budget: float) -> None:
        """Run the stages, then the cases that were not started while the budget lasts.

        `budget` is in seconds, without the factor of time limits."""
        end, left = time.monotonic() + budget, list[tuple[Stage, Case]]()
        begun = [stage for stage in stages if stage.cases]
        with tempfile.TemporaryDirectory(prefix="tgis-course-") as directory:
            try:
                self._prepare(begun, Path(directory))
                for stage in begun:
                    stage_end = min(end, time.monotonic() + stage.seconds * self.pace)
                    left += [(stage, case) for case in self._run_stage(stage, stage_end, Path(directory))]
                for stage, case in left:
                    again = replace(stage, cases=(case,))
                    if end - time.monotonic() > MIN_CASE_S:
                        self._run_stage(again, end, Path(directory))
            finally:
                for forker in self._forkers:
                    forker.stop()

    def _prepare(self, stages: Sequence[Stage], directory: Path) -> None:
        count = max((stage.num_parallel for stage in stages), default=0)
        libraries = list(dict.fromkeys(name for stage in stages for name in stage.libraries))
        logs = [directory / f"forker-{index}" for index in range(count)]
        self._forkers = [Forker(log, libraries, self.import_s) for log in logs]
        with ThreadPoolExecutor(max(1, count)) as pool:
            list(pool.map(Forker.start, self._forkers))
        with self.logs.open("ab") as file:
            file.writelines(log.read_bytes() for log in logs[:1])

    def _run_stage(self, stage: Stage, end: float, directory: Path) -> list[Case]:
        """Run a stage, and return the cases for which no time was left."""
        waiting, left = queue.SimpleQueue[Case](), list[Case]()
        for case in stage.cases:
            waiting.put(case)

        def work(forker: Forker) -> None:
            while True:
                try:
                    case = waiting.get_nowait()
                except queue.Empty:
                    return
                if not self._run_case(stage, case, forker, end, directory):
                    left.append(case)

        with ThreadPoolExecutor(stage.num_parallel) as pool:
            list(pool.map(work, self._forkers[: stage.num_parallel]))
        return left

    def _run_case(self, stage: Stage, case: Case, forker: Forker, end: float, directory: Path) -> bool:
        recorder = self._make_recorder(stage, case)
        forker.start()
        seconds = min(case.seconds * self.pace, end - time.monotonic())
        if seconds < MIN_CASE_S:
            recorder.outcome(NOT_BEGUN, 0.0, "no time was left")
            return False
        log = directory / f"{stage.name}-{case.name}".replace("/", "-").replace(" ", "-")
        job = Job(
            stage.name,
            case.name,
            recorder.attempt,
            case.function,
            list(case.arguments),
            seconds,
            self.device,
            self.is_forking,
            str(self.results),
            str(log),
        )
        began = time.monotonic()
        forker.run(job)
        if not self._find_own(recorder, "outcome"):
            reason = "the process that keeps cases is lost"
            recorder.outcome(CRASHED, time.monotonic() - began, f"{reason}\n{read_tail(log)}")
        self._keep_log(recorder, log)
        if self.is_forking and any(
            text in end for text in FORK_ERRORS for end in self._find_own(recorder, "outcome")
        ):
            self.is_forking = False
            return self._run_case(stage, case, forker, end, directory)
        return True

    def _make_recorder(self, stage: Stage, case: Case) -> Recorder:
        attempts = count_attempts(read_results(self.results))
        number = attempts.get((stage.name, case.name), 0) + 1
        return Recorder(stage.name, case.name, number, self.results)

    def _find_own(self, recorder: Recorder, *kinds: str) -> list[str]:
        """Return the attempt's results of these kinds as text."""
        asked = recorder.stage, recorder.case, recorder.attempt
        candidates = [
            each
            for each in read_results(self.results)
            if (each.stage, each.case, each.attempt) == asked and each.kind in kinds
        ]
        return [
            f"{each.value} {each.detail}".partition("\n")[0]
            if each.kind == "outcome"
            else f"{each.key} = {each.value} {each.unit} {each.detail}".rstrip()
            for each in candidates
        ]

    def _keep_log(self, recorder: Recorder, log: Path) -> None:
        lines = self._find_own(recorder, "figure", "check", "problem", "fact", "outcome")
        printed = log.read_bytes() if log.exists() else b""
        about = f"{recorder.stage}: {recorder.case}"
        with self._lock:
            self.report("\n".join(f"{about}: {line}" for line in lines))
            with self.logs.open("ab") as file:
                file.write(f"=== {about}, attempt {recorder.attempt}\n".encode() + printed)
        log.unlink(missing_ok=True)
