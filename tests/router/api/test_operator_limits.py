"""Tests the operator's limits in each API over its own protocol."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.router.served_chats import HELLO, open_chats, post
from tests.support.router.served_grpc import LIMITS, open_grpc, status_of
from tests.support.router.served_http import LIMITS_OF_HTTP, MODEL, ServedHttp
from tgis.pb import generation_pb2 as pb

SET = {"max_best_of": 3, "max_stop_sequences": 8, "max_client_batch_size": 2, "allows_guided": False}
STOPS = [f"stop {number}" for number in range(20)]


@pytest.fixture(params=["unset", "set"])
async def is_set(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "set")


@pytest.fixture
async def http(tmp_path: Path, is_set: bool) -> AsyncIterator[ServedHttp]:
    limits = replace(LIMITS_OF_HTTP, **SET) if is_set else LIMITS_OF_HTTP
    async with open_chats(tmp_path, limits=limits, http_api="tgi,openai") as (served, _):
        yield served


async def refusal(served: ServedHttp, path: str, **body: Any) -> tuple[str, str | None] | None:
    """Return the text of a refusal and the parameter that it names, or None for an answer."""
    status, answer = await post(served, path, body)
    if status == 200:
        return None
    assert status in (400, 422)
    error = answer["error"]
    return (error, None) if isinstance(error, str) else (error["message"], error["param"])


async def test_openai(http: ServedHttp, is_set: bool) -> None:
    async def completion(**fields: Any) -> tuple[str, str | None] | None:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 2, **fields}
        return await refusal(http, "/v1/completions", **body)

    assert await completion(best_of=3) is None
    assert await completion(best_of=4) == (("best_of must be <= 3", "best_of") if is_set else None)
    assert await completion(n=4) is None
    assert await completion(prompt=["a", "b"]) is None
    refused = ("prompt must have at most 2 prompts", "prompt")
    assert await completion(prompt=["a", "b", "c"]) == (refused if is_set else None)
    assert await completion(stop=STOPS[:16]) is None, "OpenAI's own bound is larger"
    assert await completion(stop=STOPS[:17]) is not None


async def test_openai_s_constraints(http: ServedHttp, is_set: bool) -> None:
    async def chat(**fields: Any) -> tuple[str, str | None] | None:
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 2, **fields}
        return await refusal(http, "/v1/chat/completions", **body)

    refused = "grammar is not supported"
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    for fields in ({"response_format": schema}, {"response_format": {"type": "json_object"}}):
        assert await chat(**fields) == ((refused, "response_format") if is_set else None)
    assert await chat(response_format={"type": "text"}) is None
    assert await chat(guided_regex="a+") == ((refused, "guided_regex") if is_set else None)


async def test_tgi(http: ServedHttp, is_set: bool) -> None:
    async def generate(**parameters: Any) -> str | None:
        error = await refusal(http, "/generate", inputs="a", parameters={"max_new_tokens": 2, **parameters})
        return error and error[0]

    max_stops = 8 if is_set else 4
    assert await generate(stop=STOPS[:max_stops]) is None
    text = f"Input validation error: `stop` supports up to {max_stops} stop sequences. Given: {max_stops + 1}"
    assert await generate(stop=STOPS[: max_stops + 1]) == text
    max_stops = 3 if is_set else 2
    assert await generate(best_of=max_stops, do_sample=True) is None
    text = f"Input validation error: `best_of` must be > 0 and <= {max_stops}. Given: {max_stops + 1}"
    assert await generate(best_of=max_stops + 1, do_sample=True) == text
    refused = "Input validation error: grammar is not supported"
    assert await generate(grammar={"type": "regex", "value": "a+"}) == (refused if is_set else None)


async def test_grpc(tmp_path: Path, is_set: bool) -> None:
    limits = replace(LIMITS, **SET) if is_set else LIMITS
    async with open_grpc(tmp_path, limits=limits) as served:

        async def status(num_stops: int = 0, **decoding: Any) -> tuple[grpc.StatusCode, str]:
            stopping = pb.StoppingCriteria(max_new_tokens=2, stop_sequences=STOPS[:num_stops])
            params = pb.Parameters(stopping=stopping, decoding=pb.DecodingParameters(**decoding))
            request = pb.BatchedGenerationRequest(
                requests=[pb.GenerationRequest(text="a")] * 3, params=params
            )
            return await status_of(served.stub.Generate(request))

        max_stops = 8 if is_set else 6
        assert (await status(max_stops))[0] is grpc.StatusCode.OK, "a batch over gRPC has no other limit"
        code, text = await status(max_stops + 1)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert text.startswith(f"can specify at most {max_stops} non-empty stop sequences")
        code, text = await status(regex="a+")
        refused = (grpc.StatusCode.INVALID_ARGUMENT, "grammar is not supported")
        assert (code, text) == (refused if is_set else (grpc.StatusCode.OK, text))


async def test_less_than_a_api_s_own(tmp_path: Path) -> None:
    limits = replace(LIMITS, max_stop_sequences=1)
    async with open_grpc(tmp_path, limits=limits) as served:
        params = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=2, stop_sequences=STOPS[:6]))
        request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="a")], params=params)
        assert (await status_of(served.stub.Generate(request)))[0] is grpc.StatusCode.OK
