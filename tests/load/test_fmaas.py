"""The client of fmaas, with a service of fixed answers on a real port."""

import time
from dataclasses import replace

import pytest

from tests.support.canned_service import CannedService, serve
from tgis.load.apis.fmaas import FmaasClient
from tgis.load.apis.interface import LoadTarget
from tgis.load.errors import AnswerError
from tgis.load.records import AnswerReceiver, AnswerRecord, ChatTurn, Prompting, RunClock
from tgis.pb import generation_pb2 as pb

PROMPTING = Prompting(turns=(ChatTurn("user", "count"),), new_tokens=3, is_exact=True, seed=5)


async def send(prompting: Prompting, service: CannedService) -> tuple[AnswerRecord, str]:
    record = AnswerRecord(0, 0, 0.0, 0.0, prompting.new_tokens)
    with serve(service) as target:
        client = FmaasClient(LoadTarget(address=target))
        await client.open()
        receiver = AnswerReceiver(record, RunClock(time.monotonic()))
        try:
            await client.send(prompting, receiver)
        finally:
            await client.close()
    return record, receiver.text


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


async def test_parameters_of_a_request() -> None:
    service = CannedService()
    given = {"temperature": 0.5, "top_k": 7, "top_p": 0.5, "max_input_tokens": 9, "has_token_details": True}
    await send(replace(PROMPTING, **given, adapter_id="a", soft_prompt_id="p"), service)  # type: ignore[arg-type]
    request = service.asked[-1]
    assert (request.adapter_id, request.prefix_id) == ("a", "p")
    params = request.params
    assert (params.truncate_input_tokens, params.response.generated_tokens) == (9, True)
    assert (params.sampling.top_k, params.sampling.top_p, params.sampling.seed) == (7, 0.5, 5)
    assert (params.stopping.min_new_tokens, params.stopping.max_new_tokens) == (3, 3)


async def test_a_failure_in_a_stream_is_its_status() -> None:
    with pytest.raises(AnswerError, match="UNAVAILABLE"):
        await send(replace(PROMPTING, turns=(ChatTurn("user", "fail"),)), CannedService())
