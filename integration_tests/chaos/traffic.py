"""Traffic of the load generator: clients of every API that repeat some conversations without pause. Their
answers are known from a run without faults."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from random import Random
from types import TracebackType
from typing import Any, Self

from bench.generator import COMPLETIONS, FMAAS, Generator, check_answers, load_processes
from integration_tests.chaos.tally import PartyRecord
from integration_tests.chaos.target import ADAPTER, STEADY, Target
from integration_tests.support.greedy_answers import WORDS
from tgis.load.job import LoadJob
from tgis.load.records import AnswerRecord
from tgis.load.workload.conversations import Workload

NUM_TEXTS = 60
CALLS_OF_A_CONNECTION = 20
ERROR_PAUSE_S = 0.1


@dataclass(frozen=True)
class Party:
    """Clients of one API, and the conversations that they repeat in turn."""

    api: str
    num_clients: int
    workload: Workload


def make_parties(seed: int) -> list[Party]:
    """Return clients whose texts are greedy and sampled with a seed, streamed and whole, alone and several in
    a call, with and without soft prompts, adapters, constraints and penalties, and cancelled."""
    random = Random(seed)
    texts = tuple(" ".join(random.choices(WORDS, k=random.randint(1, 20))) for _ in range(NUM_TEXTS))

    def make(api: str, num_clients: int, num_distinct: int, **more: Any) -> Party:
        fields = {"seed": seed, "texts": texts, "output_tokens": "20-150", "num_distinct": num_distinct}
        fields |= {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "sampled_share": 0.5}
        fields |= {"unary_share": 0.4, "cancel_share": 0.05}
        return Party(api, num_clients, Workload(**{**fields, **more}))

    rules = (("json", 0.1), ("regex", 0.05), ("choice", 0.05))
    tuned = {"soft_prompt_ids": (STEADY,), "soft_prompt_share": 0.3, "constraints": rules}
    changed = {"adapter_ids": (ADAPTER,), "adapter_share": 0.5, "repetition_penalty": 1.3}
    return [
        make(FMAAS, 3, 24, batch="1:0.6,2:0.2,3:0.2", **tuned),
        make(FMAAS, 2, 12, **changed),
        make(COMPLETIONS, 1, 8, batch="1:0.5,2:0.5"),
        make("chat", 1, 8),
        make("tgi", 1, 8, may_end_early=True),
        make("lmi", 1, 8),
        make("engine", 1, 8),
    ]


class Traffic:
    """Parties with a load process each. Use it in a `with` block."""

    def __init__(self, target: Target, parties: Sequence[Party]) -> None:
        self._target, self._parties = target, parties
        self._stack = ExitStack()
        self._generators: list[Generator] = []
        self._undisturbed: list[list[AnswerRecord]] = []
        self._starts: dict[int, float] = {}
        self._runs: list[Future[list[AnswerRecord]]] = []

    def __enter__(self) -> Self:
        self._generators = [self._stack.enter_context(load_processes()) for _ in self._parties]
        self._threads = self._stack.enter_context(ThreadPoolExecutor(len(self._parties)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()
        self._stack.close()

    def learn(self) -> None:
        """Send each conversation once, before there are faults. Raises BenchError if one fails."""
        jobs = [
            replace(
                self._job(party),
                workload=replace(party.workload, cancel_share=0.0),
                num_conversations=party.workload.num_distinct,
            )
            for party in self._parties
        ]
        self._undisturbed = [run.result() for run in self._send(jobs)]
        for records in self._undisturbed:
            check_answers(records)

    def begin(self) -> None:
        """Send the conversations again and again until the end."""
        jobs = [
            replace(self._job(party), first_index=party.workload.num_distinct, num_conversations=None)
            for party in self._parties
        ]
        self._runs = self._send(jobs)

    def end(self) -> list[PartyRecord]:
        """Wait for the answers to all sent calls. Raises BenchError if a load process failed."""
        self._stop()
        return [
            PartyRecord(party.api, self._undisturbed[number], run.result(), self._starts[number])
            for number, (party, run) in enumerate(zip(self._parties, self._runs, strict=True))
        ]

    def _stop(self) -> None:
        for generator, run in zip(self._generators, self._runs, strict=False):
            if not run.done():
                generator.stop()

    def _job(self, party: Party) -> LoadJob:
        job = self._target.make_job(party.api, party.workload, party.num_clients)
        target = replace(job.target, calls_per_connection=CALLS_OF_A_CONNECTION)
        return replace(job, target=target, error_pause_s=ERROR_PAUSE_S)

    def _send(self, jobs: Sequence[LoadJob]) -> list[Future[list[AnswerRecord]]]:
        def send(number: int, job: LoadJob) -> list[AnswerRecord]:
            def note(start: float) -> None:
                self._starts[number] = start

            return self._generators[number].run(job, begin=note).records

        return [self._threads.submit(send, number, job) for number, job in enumerate(jobs)]
