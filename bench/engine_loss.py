"""Measures the pause of 64 streams when the engine process of a service with three router workers is killed,
compared with the time to prefill prompts of their length, and checks that their texts are those of an
undisturbed run."""

import os
import signal
import statistics
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import psutil

from bench.generator import Generator, closed_loop, load_processes, new_prompts, time_of_token
from bench.rates import service_flags
from bench.service import BenchError, launch
from tests.support.processes import children_of
from tgis.load.job import LoadJob
from tgis.load.records import AnswerRecord

STREAMS, PROMPT_TOKENS, NEW_TOKENS, WORKERS = 64, 32, 96, 3
COMES_AFTER = 32  # tokens of every stream
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Round:
    pause_s: float
    computing_s: float
    """Time for prompts as long as the streams at the loss to get their first tokens."""


def run(options: Namespace, model: Path) -> dict[str, Any]:
    """Measure the losses. Raises BenchError."""
    flags = [*service_flags(options), "--router-workers", str(WORKERS)]
    log = options.cache / "engine_loss.log"
    with launch(model, log, flags) as (target, _), load_processes() as generator:
        rounds = [_measure_round(generator, target) for _ in range(options.rounds)]
    pauses = [each.pause_s for each in rounds]
    computing = statistics.median(each.computing_s for each in rounds)
    detail = f"computing as many tokens anew takes {computing:.2f} s; no text differs"
    return {"figures": {"engine loss": {"values": pauses, "detail": detail}}, "rounds": rounds}


def _measure_round(generator: Generator, target: str) -> Round:
    """Run the streams. Each run has new prompts, which are in no cache, except for the run that is
    compared."""
    job = _streams(target, PROMPT_TOKENS, NEW_TOKENS)
    undisturbed = generator.answers(job)
    loss = _Loss(max(time_of_token(answer, COMES_AFTER) for answer in undisturbed))
    streams = generator.answers(job, begin=loss.cause_later)
    if any(one.digest != other.digest for one, other in zip(streams, undisturbed, strict=True)):
        raise BenchError("a text differs from that of an undisturbed run")
    firsts = generator.answers(_streams(target, PROMPT_TOKENS + COMES_AFTER, 1))
    result = Round(_longest_pause(streams, loss.happened_after()), max(answer.ended for answer in firsts))
    print(f"pause {result.pause_s:.2f} s, computing {result.computing_s:.2f} s", file=sys.stderr, flush=True)
    return result


def _streams(target: str, num_input: int, num_new: int) -> LoadJob:
    workload = new_prompts(num_input, num_new, temperature=1.0, has_token_details=True)
    return closed_loop(target, workload, STREAMS, timeout_s=TIMEOUT_S)


@dataclass
class _Loss:
    """Kills the engine process of the only service that this process has launched."""

    after_s: float
    """Seconds from the start of a run."""
    _killed: threading.Event = field(default_factory=threading.Event)
    _start: float = 0.0
    _killed_at: float = 0.0

    def cause_later(self, start: float) -> None:
        self._start = start
        threading.Timer(start + self.after_s - time.monotonic(), self._cause).start()

    def _cause(self) -> None:
        [engine] = chain(*(children_of(child.pid).get("engine", []) for child in psutil.Process().children()))
        os.kill(engine, signal.SIGKILL)
        self._killed_at = time.monotonic()
        self._killed.set()

    def happened_after(self) -> float:
        """Return the seconds from the start of the run to the loss."""
        if not self._killed.wait(TIMEOUT_S):
            raise BenchError("the engine process was not killed")
        return self._killed_at - self._start


def _longest_pause(streams: Sequence[AnswerRecord], killed_after: float) -> float:
    """Return the longest time between two messages of a stream whose second message came after the loss."""
    pairs = [pair for stream in streams for pair in pairwise(stream.arrivals)]
    pauses = [after - before for before, after in pairs if after > killed_after]
    if not pauses:
        raise BenchError("the streams ended before the engine process was killed")
    return max(pauses)
