"""Tests errors of LMI's API in DJL's forms: before an answer, and as the last line of a stream."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_exchange import HttpReply
from tests.support.router.served_http import ServedHttp
from tests.support.router.served_inputs import PROMPT, inputs
from tests.support.router.served_lmi import ask, open_lmi
from tgis.net.framing import frame
from tgis.pb import shard_pb2

pytestmark = pytest.mark.usefixtures("steady_clock")

STREAM = inputs(max_new_tokens=8, details=True) | {"stream": True}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[ServedHttp]:
    async with open_lmi(tmp_path) as served:
        yield served


def refused(status: int, kind: str, message: str) -> tuple[int, dict[str, Any]]:
    return status, {"code": status, "type": kind, "message": message}


def status_and_body(answer: HttpReply) -> tuple[int, Any]:
    assert answer.headers["content-type"] == "application/json"
    return answer.status, answer.json


async def test_a_full_queue(served: ServedHttp) -> None:
    body = {"inputs": ["a"] * 65, "parameters": {"n": 2}}  # more than the 128 places
    answer = await ask(served, body)
    text = "Worker queue capacity exceeded for model: served-model"
    assert status_and_body(answer) == refused(503, "WlmCapacityException", text)
    assert answer.headers["retry-after"] == "1"


async def test_refusals_by_the_server(served: ServedHttp) -> None:
    cases = [
        (ask(served, STREAM, "/predictions/other"), 404, "ModelNotFoundException", "Model not found: other"),
        (ask(served, STREAM, model_name="x"), 404, "ModelNotFoundException", "Model not found: x"),
        (
            ask(served, STREAM, "/invocations?model_name=y/z"),
            404,
            "ModelNotFoundException",
            "Model not found: y/z",
        ),
        (
            ask(served, STREAM | {"model_name": "w"}, "/models/alias/invoke"),
            404,
            "ModelNotFoundException",
            "Model not found: w",
        ),
        (ask(served, STREAM, "/no"), 404, "ResourceNotFoundException", "there is no such path in this API"),
        (
            ask(served, b"", method="GET"),
            405,
            "MethodNotAllowedException",
            "the path is served for POST only",
        ),
        (
            ask(served, {"inputs": "a" * (5 << 20)}),
            413,
            "PayloadTooLargeException",
            "the request has more than 4194304 bytes",
        ),
    ]
    for call, *expected in cases:
        assert status_and_body(await call) == refused(*expected)  # type: ignore[arg-type]


async def test_headers(served: ServedHttp) -> None:
    given = {"X-Amzn-SageMaker-Custom-Attributes": "trace=7,b", "X-Amzn-SageMaker-Target-Model": "m.tar.gz"}
    for body in (STREAM, inputs(), {"messages": []}, b"{"):
        answer = await ask(served, body, **given, **{"X-Amzn-SageMaker-Session-Id": "NEW_SESSION"})
        assert answer.headers["x-amzn-sagemaker-custom-attributes"] == "trace=7,b"
    for headers, text in (
        ({"X-Amzn-SageMaker-Custom-Attributes": "x" * 1025}, "at most 1024 printable characters of ASCII"),
        ({"X-Amzn-SageMaker-Custom-Attributes": "é"}, "at most 1024 printable characters of ASCII"),
        ({"x-synchronous": "false"}, "not supported; leave x-synchronous out"),
    ):
        answer = await ask(served, STREAM, **headers)
        assert "x-amzn-sagemaker-custom-attributes" not in answer.headers
        assert (answer.status, list(answer.json)) == (424, ["code", "error"])
        assert answer.json["error"].endswith(text)
    assert (await ask(served, STREAM, **{"x-synchronous": "true"})).status == 200
    for kind in ("text/csv", "application/x-www-form-urlencoded"):
        text = "the content type must be application/json or text/plain"
        expected = {"code": 415, "type": "UnsupportedMediaTypeException", "message": text}
        assert status_and_body(await ask(served, STREAM, **{"content-type": kind})) == (415, expected)


async def test_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    async with open_lmi(tmp_path, tokens=tmp_path / "tokens") as served:
        answer = await ask(served, STREAM, authorization="Bearer wrong")
        assert (answer.status, answer.json["code"], answer.json["type"]) == (
            401,
            401,
            "UnauthorizedException",
        )
        assert (await ask(served, STREAM, authorization="Bearer secret")).status == 200
        answer = await ask(served, b"", "/ping", method="GET")  # the probe needs no token
        assert status_and_body(answer) == (200, {"status": "Healthy"})


async def test_the_probe_of_a_service_that_is_not_ready(tmp_path: Path) -> None:
    async with open_lmi(tmp_path, is_ready=lambda: False) as served:
        answer = await ask(served, b"", "/ping", method="GET")
        assert status_and_body(answer) == (503, {"status": "Unhealthy"})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token(served: ServedHttp, stream: bool) -> None:
    served.scene.shard.model.refuses = lambda row: True
    answer = await ask(served, STREAM | {"stream": stream})
    assert (answer.status, list(answer.json), answer.json["code"]) == (424, ["code", "error"], 424)
    assert "Input Parsing" not in answer.json["error"]
    assert PROMPT not in answer.json["error"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_first_token_that_is_late(tmp_path: Path, stream: bool) -> None:
    async with open_lmi(tmp_path, first_token_timeout=0.2) as served:
        served.scene.shard.step_s = 0.5
        answer = await ask(served, STREAM | {"stream": stream})
        assert status_and_body(answer) == refused(400, "TranslateException", "Time out in: 0.2")
        await given_back(served)


async def test_a_further_token_that_is_late(tmp_path: Path) -> None:
    async with open_lmi(tmp_path, next_token_timeout=0.4) as served:
        late_at_fourth_step(served)
        answer = await ask(served, STREAM | {"stream": False})
        assert status_and_body(answer) == (424, {"code": 424, "error": "no token came within 0.4 s"})
        late_at_fourth_step(served)
        *lines, last = (await ask(served, STREAM)).lines
        assert 0 < len(lines) <= 3
        assert (last["token"]["id"], last["details"]["finish_reason"]) == (-1, "error")
        assert last["token"]["error_msg"] == "no token came within 0.4 s"
        await given_back(served)


async def given_back(served: ServedHttp) -> None:
    """Wait until the late step has been answered."""
    for _ in range(200):
        if not served.scene.left():
            return
        await asyncio.sleep(0.01)


def late_at_fourth_step(served: ServedHttp) -> None:
    def wait(response: shard_pb2.StepResponse) -> bytes:
        time.sleep(0.9)
        return frame(response)

    for _ in range(3):
        served.scene.shard.garbage.put(frame)
    served.scene.shard.garbage.put(wait)


FAILED_TOKENS = {
    "sse": {"id": -1, "text": "", "log_prob": -1.0, "special_token": True},
    "tgi_compat": {"id": -1, "text": "", "logprob": -1.0, "special": True},
}


@pytest.mark.parametrize("formatter", [None, "sse", "tgi_compat"])
async def test_a_failure_after_it(tmp_path: Path, formatter: str | None) -> None:
    """The last line has the text so far, and marks it as incomplete."""
    async with open_lmi(tmp_path, formatter) as served:
        for body in (
            STREAM,
            inputs(max_new_tokens=8, return_full_text=True, details=False) | {"stream": True},
        ):
            whole = lines_of(await ask(served, body))
            assert len(whole) == 8
            fail_at_fourth_step(served)
            answer = await ask(served, body)
            assert answer.status == 200
            *lines, last = lines_of(answer)
            assert lines == whole[: len(lines)]
            assert 0 < len(lines) <= 3
            message = last["token"].pop("error_msg", None)
            assert (message is None) == (formatter == "tgi_compat")
            assert last["token"] == FAILED_TOKENS[formatter or "sse"]
            begin = "" if body is STREAM else PROMPT
            assert last["generated_text"] == begin + "".join(line["token"]["text"] for line in lines)
            assert len(last["generated_text"]) > len(begin)
            expected = {"finish_reason": "error"}
            if body is STREAM:
                expected |= {"generated_tokens": len(lines), "inputs": PROMPT}  # type: ignore[dict-item]
            assert last["details"] == expected


async def test_a_failure_after_a_completion_has_begun(served: ServedHttp) -> None:
    """The failure is a line too, with OpenAI's object."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "stream": True}
    fail_at_fourth_step(served)
    answer = await ask(served, body)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/jsonlines")
    *lines, last = answer.lines
    assert all(line["choices"] for line in lines)
    assert last["error"]["message"].startswith("Request failed during generation: ")


def lines_of(answer: HttpReply) -> list[Any]:
    return [HttpReply(0, {}, line.removeprefix(b"data: ")).json for line in answer.body.splitlines() if line]


def fail_at_fourth_step(served: ServedHttp) -> None:
    """Make the shard refuse the row after three tokens."""

    def refuse(response: shard_pb2.StepResponse) -> bytes:
        [row] = response.rows[:1]
        response.errors.add(row=row, message="refused")
        response.rows = response.token_ids = response.ended = response.logprobs = b""
        return frame(response)

    for _ in range(3):
        served.scene.shard.garbage.put(frame)
    served.scene.shard.garbage.put(refuse)


async def test_a_stream_counts_until_its_client_leaves(served: ServedHttp) -> None:
    served.scene.shard.step_s = 0.02
    host, _, port = served.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"inputs": "a", "stream": true, "parameters": {"max_new_tokens": 150, "ignore_eos_token": true}}'
    head = f"POST /invocations HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    while b'{"token":' not in await reader.readline():
        pass
    assert b"tgi_http_api_active_streams 1" in served.scene.metrics.render()
    writer.close()
    await writer.wait_closed()
    failures = served.scene.metrics.request_failure
    for _ in range(200):
        if failures.values().get(("cancelled",)):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it goes on")
