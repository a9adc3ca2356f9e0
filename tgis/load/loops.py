"""Runs one process's share of a run: a closed loop, whose clients wait for answers, or an open loop, which
sends at given times whatever the service does."""

import asyncio
from collections.abc import Callable
from itertools import count

from tgis.load.answer_checks import find_faults, find_unexpected_end
from tgis.load.apis.interface import ApiClient
from tgis.load.errors import AnswerError, CancellationError
from tgis.load.job import LoadJob
from tgis.load.records import (
    MESSAGE_LENGTH,
    AnswerReceiver,
    AnswerRecord,
    ChatTurn,
    Prompting,
    RunClock,
)
from tgis.load.workload.conversations import Conversation, ConversationSource, Turn

TIMEOUT = "timeout"
WARM_UP_INDEX = 1 << 48
"""Numbers of the conversations of warm-ups, apart from those of runs."""


class LoadRun:
    """Share of one run. `records` has the answers in the order of their ends."""

    def __init__(self, job: LoadJob, client: ApiClient, source: ConversationSource) -> None:
        self._job = job
        self._client = client
        self._source = source
        self.records: list[AnswerRecord] = []
        self.num_open = 0
        self._is_stopped = False

    def stop(self) -> None:
        """Send nothing further, and end the run when the open requests have ended."""
        self._is_stopped = True

    async def warm_up(self) -> None:
        """Send conversations before the run. Their failures show again in the run."""
        clock = RunClock(0.0)
        first = WARM_UP_INDEX + self._job.first_index
        conversations = [self._source.make(first + index) for index in range(self._job.warm_up)]
        await asyncio.gather(*(self._converse(one, clock(), clock) for one in conversations))
        self.records.clear()

    async def run(self, clock: RunClock) -> None:
        """Wait for the start, which the clock defines, and run the loop to its end."""
        if self._job.concurrency:
            numbers = count()
            clients = (self._run_client(numbers, clock) for _ in range(self._job.concurrency))
            await _wait_until(0.0, clock)
            await asyncio.gather(*clients)
            return
        async with asyncio.TaskGroup() as calls:
            for number, intended in enumerate(self._job.schedule):
                conversation = self._make(number)  # before the wait, so that the call is not late
                await _wait_until(intended, clock)
                if self._is_stopped:
                    return
                calls.create_task(self._converse(conversation, intended, clock))

    async def _run_client(self, numbers: "count[int]", clock: RunClock) -> None:
        job = self._job
        while not self._is_stopped and (job.duration_s is None or clock() < job.duration_s):
            number = next(numbers)
            if job.num_conversations is not None and number >= job.num_conversations:
                return
            if not await self._converse(self._make(number), None, clock):
                await asyncio.sleep(job.error_pause_s)

    def _make(self, number: int) -> Conversation:
        return self._source.make(self._job.first_index + number * self._job.step)

    async def _converse(self, conversation: Conversation, intended: float | None, clock: RunClock) -> bool:
        """Send the turns one after the other, and return False if one failed. Only the first can have an
        intended time."""
        turns: list[ChatTurn] = []
        for number, turn in enumerate(conversation.turns):
            turns.append(ChatTurn("user", turn.text))
            prompting = self._prompting(conversation, turn, tuple(turns))
            now = clock()
            due = intended if intended is not None and number == 0 else now
            record = AnswerRecord(conversation.index, number, due, now, prompting.wanted_tokens)
            record.repeats = conversation.repeats
            is_last = number + 1 == len(conversation.turns)
            cancel_after = conversation.cancel_after if is_last else None
            text = await self._send(prompting, AnswerReceiver(record, clock, cancel_after), clock)
            if record.error is not None:
                return False
            turns.append(ChatTurn("assistant", text))
        return True

    def _prompting(self, conversation: Conversation, turn: Turn, turns: tuple[ChatTurn, ...]) -> Prompting:
        workload = self._job.workload
        return Prompting(
            turns=turns,
            new_tokens=turn.new_tokens,
            is_exact=not workload.may_end_early and conversation.rule is None,
            seed=conversation.seed,
            more_texts=turn.more_texts,
            is_stream=not conversation.is_unary,
            max_input_tokens=turn.max_input_tokens,
            counts_input=workload.counts_inputs,
            has_token_details=workload.has_token_details,
            temperature=workload.temperature if conversation.is_sampled else None,
            top_k=workload.top_k,
            top_p=workload.top_p,
            repetition_penalty=workload.repetition_penalty,
            rule=conversation.rule,
            adapter_id=conversation.adapter_id,
            soft_prompt_id=conversation.soft_prompt_id,
        )

    async def _send(self, prompting: Prompting, receiver: AnswerReceiver, clock: Callable[[], float]) -> str:
        """Send a request, record and check its answer, and return the text."""
        record = receiver.record
        self.num_open += 1
        try:
            async with asyncio.timeout(self._job.timeout_s):
                await self._client.send(prompting, receiver)
            record.error = find_unexpected_end(prompting, receiver)
        except TimeoutError:
            record.error = TIMEOUT
        except AnswerError as error:
            record.error = error.kind
            record.message = error.message[:MESSAGE_LENGTH]
        except CancellationError:
            record.is_cancelled = True
        self.num_open -= 1
        record.ended = clock()
        if record.is_complete:
            record.faults = find_faults(prompting, receiver)
            if self._job.keeps_texts:
                record.digest = receiver.digest()
        self.records.append(record)
        return receiver.text


async def _wait_until(due: float, clock: RunClock) -> None:
    """Wait until the clock shows the time. The event loop's timers may be a millisecond early."""
    left = due - clock()
    while left > 0:
        await asyncio.sleep(left)
        left = due - clock()
