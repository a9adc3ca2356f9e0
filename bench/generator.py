"""Runs the load processes of `tgis bench` for the measurements of this folder."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from bench.service import BenchError
from tgis.load.apis.interface import LoadTarget
from tgis.load.errors import LoadError
from tgis.load.job import LoadJob
from tgis.load.processes import LoadProcesses, RunRecord
from tgis.load.records import AnswerRecord
from tgis.load.workload.conversations import TokenScale, Workload

FMAAS, COMPLETIONS = "fmaas", "completions"
TIMEOUT_S = 300.0


class Generator:
    """Load processes of a measurement, for one run after the other."""

    def __init__(self, processes: LoadProcesses, runner: asyncio.Runner) -> None:
        self._processes = processes
        self._runner = runner

    def run(self, *jobs: LoadJob, begin: Callable[[float], None] | None = None) -> RunRecord:
        """Run a job per process, with the same start, with which `begin` is called. Raises BenchError."""
        try:
            return self._runner.run(self._processes.run(jobs, lambda _: None, begin))
        except LoadError as error:
            raise BenchError(str(error)) from error

    def stop(self) -> None:
        """Let the run that another thread waits for end as soon as its open requests have ended."""
        self._runner.get_loop().call_soon_threadsafe(self._processes.stop)

    def answers(self, *jobs: LoadJob, begin: Callable[[float], None] | None = None) -> list[AnswerRecord]:
        """Return the answers in the order of their conversations. Raises BenchError if one is not right."""
        records = self.run(*jobs, begin=begin).records
        check_answers(records)
        return sorted(records, key=lambda record: record.index)


@contextmanager
def load_processes(count: int = 1) -> Iterator[Generator]:
    processes = LoadProcesses(count)
    with asyncio.Runner() as runner:
        runner.run(processes.__aenter__())
        try:
            yield Generator(processes, runner)
        finally:
            runner.run(processes.__aexit__())


def new_prompts(input_tokens: int, new_tokens: int, **more: Any) -> Workload:
    """Return prompts of exactly this length, which are in no service's cache."""
    fields = {"seed": time.time_ns(), "cuts_prompts": True, **more}
    return Workload(input_tokens=str(input_tokens), output_tokens=str(new_tokens), **fields)


def closed_loop(target: str, workload: Workload, clients: int, **more: Any) -> LoadJob:
    """Return the job of some clients, with a connection each. They send one request each if `more` does not
    say otherwise."""
    job = LoadJob(
        api=FMAAS,
        target=LoadTarget(address=target, num_channels=clients),
        workload=workload,
        scale=TokenScale(),
        first_index=0,
        step=1,
        warm_up=0,
        concurrency=clients,
        num_conversations=clients,
        timeout_s=TIMEOUT_S,
        keeps_texts=True,
    )
    return replace(job, **more)


def open_loop(target: str, workload: Workload, schedule: Sequence[float], channels: int = 1) -> LoadJob:
    """Return the job that sends at the given times, in seconds from the start."""
    return closed_loop(target, workload, channels, concurrency=0, schedule=tuple(schedule))


def check_answers(records: Sequence[AnswerRecord]) -> None:
    """Raise BenchError if a request failed, or its answer has not the length that it should have."""
    failed = [record.error or record.faults[0] for record in records if record.error or record.faults]
    if failed:
        raise BenchError(f"{len(failed)} of {len(records)} requests failed, first: {failed[0]}")


def time_of_token(record: AnswerRecord, number: int) -> float:
    """Return the time of the message with a token of the answer, counted from 1."""
    times = zip(record.arrivals, record.counts, strict=True)
    return next(at for at, count in times if count >= number)


@dataclass(frozen=True)
class Loaded:
    """Contender that is a service, with requests that are sent at the same time."""

    name: str
    generator: Generator
    target: str
    api: str = FMAAS

    def generate(self, batch: int, input_tokens: int, new_tokens: int, seed: int) -> float:
        """Return the seconds until all answers are complete. Raises BenchError."""
        workload = new_prompts(input_tokens, new_tokens, seed=seed)
        answers = self.generator.answers(closed_loop(self.target, workload, batch, api=self.api))
        return max(answer.ended for answer in answers)
