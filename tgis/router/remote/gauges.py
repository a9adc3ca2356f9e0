"""Gathers the gauges of all router processes for a scrape, via the engine process."""

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

from tgis.router.metrics.gauges import GaugeValues
from tgis.router.metrics.metrics import Metrics
from tgis.router.remote import messages as wire

# Time limit for workers. It is shorter than the scrape's, so that a hanging worker affects only its own
# values.
ANSWER_S = 0.5

Send = Callable[[Any], None]


def report_gauges(metrics: Metrics, message: wire.RequestGauges) -> wire.OwnGauges:
    """Return this process's gauges. Also publish its counters, because the scrape reads them next."""
    metrics.publish()
    return wire.OwnGauges(message.number, metrics.gauge_values())


class Questions:
    """Sent questions, each with its answers so far."""

    def __init__(self) -> None:
        self._numbers = count()
        self._answers: dict[int, tuple[int, list[Any], asyncio.Event]] = {}

    @contextmanager
    def ask(self, num_answers: int) -> Iterator[tuple[int, list[Any], asyncio.Event]]:
        """Yield the number of a new question, its list of answers, and an event that is set when all have
        arrived."""
        number = next(self._numbers)
        answers = list[Any]()
        complete = asyncio.Event()
        self._answers[number] = num_answers, answers, complete
        if not num_answers:
            complete.set()
        try:
            yield number, answers, complete
        finally:
            del self._answers[number]

    def answer(self, number: int, answer: Any) -> None:
        """Add an answer, unless its question has ended."""
        if number not in self._answers:
            return
        num_answers, answers, complete = self._answers[number]
        answers.append(answer)
        if len(answers) >= num_answers:
            complete.set()


class GaugeGatherer:
    """Engine's side: asks the workers."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._questions = Questions()
        self._tasks: set[asyncio.Task[None]] = set()

    def gather(self, message: wire.AskGauges, reply: Send, workers: Collection[Send]) -> None:
        """Start a task that answers a worker with the gauges of this process and of the other workers."""
        task = asyncio.create_task(self._gather(message.number, reply, workers), name="gauges")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def take(self, message: wire.OwnGauges) -> None:
        self._questions.answer(message.number, message.values)

    async def _gather(self, asked: int, reply: Send, workers: Collection[Send]) -> None:
        self._metrics.publish()
        with self._questions.ask(len(workers)) as (number, answers, complete):
            for send in workers:
                send(wire.RequestGauges(number))
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await complete.wait()
            reply(wire.OtherGauges(asked, [self._metrics.gauge_values(), *answers]))


class GaugeAsker:
    """Worker's side: asks the engine."""

    def __init__(self) -> None:
        self._questions = Questions()

    async def ask(self, send: Send) -> list[GaugeValues]:
        """Return the gauges of all other processes that answer. This has no time limit."""
        with self._questions.ask(1) as (number, answers, complete):
            send(wire.AskGauges(number))
            await complete.wait()
            gauges: list[GaugeValues] = answers[0]
            return gauges

    def take(self, message: wire.OtherGauges) -> None:
        self._questions.answer(message.number, message.values)
