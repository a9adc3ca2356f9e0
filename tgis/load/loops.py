"""Runs one process's share of a run: a closed loop, whose clients wait for answers, or an open loop, which
sends at given times whatever the service does."""

import asyncio
import hashlib
from collections.abc import Callable
from itertools import count

from tgis.load.apis.interface import ApiClient
from tgis.load.errors import AnswerError
from tgis.load.job import LoadJob
from tgis.load.records import AnswerReceiver, AnswerRecord, ChatTurn, Prompting, RunClock
from tgis.load.workload.constraints import follows
from tgis.load.workload.conversations import Conversation, ConversationSource, Turn

TIMEOUT = "timeout"
LENGTH, CONSTRAINT = "wrong length", "constraint violated"
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
                calls.create_task(self._converse(conversation, intended, clock))

    async def _run_client(self, numbers: "count[int]", clock: RunClock) -> None:
        job = self._job
        while job.duration_s is None or clock() < job.duration_s:
            number = next(numbers)
            if job.num_conversations is not None and number >= job.num_conversations:
                return
            await self._converse(self._make(number), None, clock)

    def _make(self, number: int) -> Conversation:
        return self._source.make(self._job.first_index + number * self._job.step)

    async def _converse(self, conversation: Conversation, intended: float | None, clock: RunClock) -> None:
        """Send the turns one after the other. Only the first can have an intended time."""
        turns: list[ChatTurn] = []
        for number, turn in enumerate(conversation.turns):
            turns.append(ChatTurn("user", turn.text))
            prompting = self._prompting(conversation, turn, tuple(turns))
            now = clock()
            due = intended if intended is not None and number == 0 else now
            record = AnswerRecord(conversation.index, number, due, now, turn.new_tokens)
            record.repeats = conversation.repeats
            text = await self._send(prompting, record, clock)
            if record.error is not None:
                return
            turns.append(ChatTurn("assistant", text))

    def _prompting(self, conversation: Conversation, turn: Turn, turns: tuple[ChatTurn, ...]) -> Prompting:
        workload = self._job.workload
        return Prompting(
            turns=turns,
            new_tokens=turn.new_tokens,
            is_exact=not workload.may_end_early and conversation.rule is None,
            seed=conversation.seed,
            is_stream=not workload.is_unary,
            max_input_tokens=turn.max_input_tokens,
            counts_input=workload.counts_inputs,
            has_token_details=workload.has_token_details,
            temperature=workload.temperature,
            top_k=workload.top_k,
            top_p=workload.top_p,
            rule=conversation.rule,
            adapter_id=conversation.adapter_id,
            soft_prompt_id=conversation.soft_prompt_id,
        )

    async def _send(self, prompting: Prompting, record: AnswerRecord, clock: Callable[[], float]) -> str:
        """Send a request, record and check its answer, and return the text."""
        receiver = AnswerReceiver(record, clock)
        self.num_open += 1
        try:
            async with asyncio.timeout(self._job.timeout_s):
                await self._client.send(prompting, receiver)
        except TimeoutError:
            record.error = TIMEOUT
        except AnswerError as error:
            record.error = error.kind
        self.num_open -= 1
        record.ended = clock()
        if record.error is None:
            record.faults = find_faults(prompting, record, receiver.text)
            if self._job.keeps_texts:
                record.digest = hashlib.sha256(receiver.text.encode()).hexdigest()[:16]
        self.records.append(record)
        return receiver.text


async def _wait_until(due: float, clock: RunClock) -> None:
    """Wait until the clock shows the time. The event loop's timers may be a millisecond early."""
    left = due - clock()
    while left > 0:
        await asyncio.sleep(left)
        left = due - clock()


def find_faults(prompting: Prompting, record: AnswerRecord, text: str) -> list[str]:
    """Return the kinds of checks that an answer fails."""
    faults = []
    is_full = record.output_tokens == prompting.new_tokens
    if record.output_tokens > prompting.new_tokens or (prompting.is_exact and not is_full):
        faults.append(LENGTH)
    # A text that has reached its maximum may have been cut.
    if prompting.rule is not None and not is_full and not follows(prompting.rule, text):
        faults.append(CONSTRAINT)
    return faults
