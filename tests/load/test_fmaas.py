"""The client of fmaas, with a service of fixed answers on a real port."""

import asyncio
import os
import time
from collections import Counter
from dataclasses import replace

import pytest

from tests.support.canned_service import CannedService, serve
from tests.support.connections import count_connections
from tgis.load.answer_checks import CONSTRAINT, LENGTH, NO_END, find_faults, find_unexpected_end
from tgis.load.apis.channels import ChannelPool
from tgis.load.apis.fmaas import FmaasClient
from tgis.load.apis.interface import LoadTarget
from tgis.load.errors import AnswerError, CancellationError
from tgis.load.job import LoadJob
from tgis.load.processes import LoadProcesses
from tgis.load.records import AnswerReceiver, AnswerRecord, ChatTurn, Prompting, RunClock
from tgis.load.workload.constraints import TextRule
from tgis.load.workload.conversations import TokenScale, Workload
from tgis.pb import generation_pb2 as pb

PROMPTING = Prompting(turns=(ChatTurn("user", "count"),), new_tokens=3, is_exact=True, seed=5)


async def send(prompting: Prompting, service: CannedService) -> tuple[AnswerRecord, str]:
    receiver = make_receiver(prompting)
    await receive(prompting, service, receiver)
    return receiver.record, receiver.text


def make_receiver(prompting: Prompting, cancel_after: int | None = None) -> AnswerReceiver:
    record = AnswerRecord(0, 0, 0.0, 0.0, prompting.wanted_tokens)
    return AnswerReceiver(record, RunClock(time.monotonic()), cancel_after)


async def receive(prompting: Prompting, service: CannedService, receiver: AnswerReceiver) -> None:
    with serve(service) as target:
        client = FmaasClient(LoadTarget(address=target))
        await client.open()
        try:
            await client.send(prompting, receiver)
        finally:
            await client.close()


async def test_a_stream_is_accepted_before_its_first_token() -> None:
    record, text = await send(PROMPTING, CannedService(delay=0.3))
    assert record.counts == [1, 2, 3]
    assert record.accepted is not None
    assert record.accepted < record.arrivals[0] - 0.2
    assert (record.input_tokens, text) == (4, "one two three")


async def test_a_whole_answer_is_one_message() -> None:
    service = CannedService()
    record, text = await send(replace(PROMPTING, is_stream=False), service)
    assert (record.counts, record.input_tokens) == ([3], 4)
    assert text.endswith("one two three")
    assert isinstance(service.asked[-1], pb.BatchedGenerationRequest)


async def test_a_call_of_several_prompts() -> None:
    prompting, service = replace(PROMPTING, more_texts=("on", "off")), CannedService()
    receiver = make_receiver(prompting)
    await receive(prompting, service, receiver)
    assert [each.text for each in service.asked[-1].requests] == ["count", "on", "off"]
    assert [receiver.text_of(number) for number in range(3)] == [
        f"{text}: one two three" for text in ("count", "on", "off")
    ]
    assert receiver.ends == dict.fromkeys(range(3), "max_tokens")
    assert (receiver.record.counts, receiver.record.input_tokens) == ([9], 12)
    assert find_unexpected_end(prompting, receiver) is None
    assert find_faults(prompting, receiver) == []


async def test_texts_of_a_call_are_checked_one_by_one() -> None:
    prompting = replace(PROMPTING, more_texts=("on",), is_exact=False, rule=TextRule("choice", ["yes"]))
    receiver = make_receiver(prompting)
    receiver.add_text("yes")
    receiver.end("eos_token")
    assert find_unexpected_end(prompting, receiver) == NO_END
    receiver.add_text("no", 1)
    receiver.end("max_tokens", 1)
    receiver.count_tokens(4)
    assert (find_unexpected_end(prompting, receiver), find_faults(prompting, receiver)) == (None, [])
    receiver.end("stop_sequence", 1)
    assert find_faults(prompting, receiver) == [CONSTRAINT]
    receiver.end("cancelled", 1)
    assert find_unexpected_end(prompting, receiver) == "ended by cancelled"


@pytest.mark.parametrize(
    ("num_tokens", "reason", "is_exact", "is_right"),
    [
        (3, "length", True, True),
        (2, "eos_token", False, True),
        (2, "eos_token", True, False),
        (2, "length", False, False),
        (4, "length", False, False),
    ],
)
def test_lengths(num_tokens: int, reason: str, is_exact: bool, is_right: bool) -> None:
    prompting = replace(PROMPTING, is_exact=is_exact)
    receiver = make_receiver(prompting)
    receiver.count_tokens(num_tokens)
    receiver.end(reason)
    assert find_faults(prompting, receiver) == ([] if is_right else [LENGTH])


def test_digests_have_texts_lengths_and_reasons() -> None:
    digests = set()
    for text, num_tokens, reason in (
        ("a", 1, "stop"),
        ("b", 1, "stop"),
        ("a", 2, "stop"),
        ("a", 1, "length"),
    ):
        receiver = make_receiver(PROMPTING)
        receiver.add_text(text)
        receiver.count_tokens(num_tokens)
        receiver.end(reason)
        digests.add(receiver.digest())
    assert len(digests) == 4


@pytest.mark.parametrize("cancel_after", [0, 2])
async def test_a_stream_is_cancelled_in_the_middle(cancel_after: int) -> None:
    service = CannedService(delay=0.1)
    receiver = make_receiver(PROMPTING, cancel_after)
    with pytest.raises(CancellationError):
        await receive(PROMPTING, service, receiver)
    assert receiver.record.output_tokens == cancel_after


async def test_calls_have_channels_of_their_own_which_are_replaced() -> None:
    opened, closed = list[int](), list[int]()

    def open_channel() -> int:
        opened.append(len(opened))
        return opened[-1]

    async def close_channel(channel: int) -> None:
        closed.append(channel)

    target = LoadTarget(address="", num_channels=2, calls_per_connection=3)
    pool = ChannelPool(target, open_channel, close_channel)
    async with pool.lease() as one, pool.lease() as two:
        assert {one, two} == {0, 1}
        async with pool.lease() as shared:
            assert shared in (one, two)
    with pytest.raises(AnswerError):
        async with pool.lease() as lost:
            raise AnswerError("UNAVAILABLE")
    assert closed == [lost]
    calls = Counter[int]()
    for _ in range(20):
        async with pool.lease() as channel:
            calls[channel] += 1
    assert max(calls.values()) == 3
    assert len(set(opened) - set(closed)) == 2
    await pool.close()
    assert sorted(closed) == opened


async def test_connections_of_failed_calls_are_closed_at_the_end_of_a_job() -> None:
    """The process then waits for its next job."""
    with serve(CannedService()) as address:
        async with LoadProcesses(1) as processes:
            job = LoadJob(
                api="fmaas",
                target=LoadTarget(address=address, num_channels=4),
                workload=Workload(texts=("fail",), output_tokens="3"),
                scale=TokenScale(),
                first_index=0,
                step=1,
                warm_up=0,
                concurrency=4,
                num_conversations=4,
            )
            run = await processes.run([job], lambda _: None)
            assert {record.error for record in run.records} == {"UNAVAILABLE"}
            port = int(address.rpartition(":")[2])
            deadline = time.monotonic() + 30
            while count_connections(os.getpid(), port):
                assert time.monotonic() < deadline, "connections are open"
                await asyncio.sleep(0.1)


async def test_parameters_of_a_request() -> None:
    service = CannedService()
    given = {
        "repetition_penalty": 1.5,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "max_input_tokens": 9,
        "has_token_details": True,
    }
    await send(replace(PROMPTING, **given, adapter_id="a", soft_prompt_id="p"), service)  # type: ignore[arg-type]
    request = service.asked[-1]
    assert (request.adapter_id, request.prefix_id) == ("a", "p")
    params = request.params
    assert (params.truncate_input_tokens, params.response.generated_tokens) == (9, True)
    assert params.decoding.repetition_penalty == 1.5
    assert (params.sampling.top_k, params.sampling.top_p, params.sampling.seed) == (7, 0.5, 5)
    assert (params.stopping.min_new_tokens, params.stopping.max_new_tokens) == (3, 3)


async def test_a_failure_in_a_stream_is_its_status() -> None:
    with pytest.raises(AnswerError, match="UNAVAILABLE") as raised:
        await send(replace(PROMPTING, turns=(ChatTurn("user", "fail"),)), CannedService())
    assert raised.value.message == "worker lost"
