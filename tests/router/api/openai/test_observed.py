"""Tests the logs, spans and metrics of each route over a real socket, with a real collector of traces."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from tests.support.router.served_chats import HELLO, open_chats, post
from tests.support.trace_collector import TRACE_ID, TRACEPARENT, Collector, values
from tgis.logs import FIELDS
from tgis.router.api.http.call_context import open_call
from tgis.router.api.http.json_bodies import BodyReader
from tgis.router.api.http.json_structure import BodyLimits
from tgis.router.api.openai.rules import OPENAI
from tgis.router.requests.span_protocols import span_protocol
from tgis.router.requests.tracing import open_tracing

TOKEN = "a-token"
HEADERS = {"authorization": f"Bearer {TOKEN}", "traceparent": TRACEPARENT}
PROMPT = {"prompt": "The quick brown fox", "max_tokens": 2}
CHAT = {"messages": HELLO, "max_tokens": 2}
ASKS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", PROMPT),
    ("/v1/chat/completions", CHAT),
    ("/tokenize", {"prompt": "The quick"}),
    ("/detokenize", {"tokens": [5, 6]}),
]
# A different part refuses each request, and each must log one line. Requests with a span reach the service.
REFUSED: list[tuple[str, dict[str, Any], int, bool]] = [
    ("/v1/completions", PROMPT | {"n": 0}, 400, False),
    ("/v1/completions", PROMPT | {"suffix": "x"}, 400, False),
    ("/v1/completions", PROMPT | {"min_tokens": 9}, 400, True),
    ("/v1/completions", PROMPT | {"guided_regex": "("}, 400, True),
    ("/v1/completions", PROMPT | {"model": "nobody"}, 404, True),
    ("/v1/completions", PROMPT | {"prompt": "word " * 500}, 400, True),
    ("/v1/chat/completions", {"messages": []}, 400, False),
    ("/v1/chat/completions", CHAT | {"guided_regex": "("}, 400, True),
    ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"tools": 1}}, 400, False),
    ("/tokenize", {"prompt": "a", "messages": HELLO}, 400, False),
    ("/detokenize", {"tokens": [999_999_999]}, 400, True),
]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"tenant team-7 {TOKEN}")
    return path


async def test_spans_and_lines_of_each_route(
    tmp_path: Path, tokens: Path, collector: tuple[Collector, str], caplog: pytest.LogCaptureFixture
) -> None:
    tracing = open_tracing(collector[1], "s")
    with caplog.at_level(logging.INFO):
        async with open_chats(tmp_path, tracing=tracing, tokens=tokens) as (served, _):
            for path, body in ASKS:
                status, answer = await post(served, path, body, **HEADERS, **{"x-request-id": path})
                assert status == 200, answer
            assert [spec.cache_salt.tenant for spec in served.handle.specs] == ["team-7"] * 2
    tracing.close()
    spans = collector[0].spans
    recorded = [(span.name, values(span.attributes), span.trace_id.hex()) for span in spans]
    assert [name for name, _, _ in recorded] == [f"POST {path}" for path, _ in ASKS]
    for (path, _), (_, attributes, trace_id) in zip(ASKS, recorded, strict=True):
        assert (attributes["http.route"], attributes["http.response.status_code"]) == (path, 200)
        assert trace_id == TRACE_ID
    own = [{name: attributes.get(name) for name in expected(path)} for path, attributes, _ in recorded[:2]]
    assert own == [expected("POST /v1/completions"), expected("POST /v1/chat/completions")]
    lines = [getattr(record, FIELDS) for record in caplog.records if hasattr(record, FIELDS)]
    names = ("api", "method", "correlation_id", "tenant", "output_tokens", "model")
    assert [[line[name] for name in names] for line in lines] == [
        ["openai", "Completion", "/v1/completions", "team-7", 2, "served-model"],
        ["openai", "ChatCompletion", "/v1/chat/completions", "team-7", 2, "served-model"],
    ]


def expected(name: str) -> dict[str, object]:
    return {
        "gen_ai.operation.name": "chat" if "chat" in name else "text_completion",
        "tgis.tenant": "team-7",
        "tgis.correlation_id": name.removeprefix("POST "),
        "gen_ai.request.model": "served-model",
        "gen_ai.usage.output_tokens": 2,
        "url.scheme": "http",
    }


async def test_each_refusal_has_one_line_and_its_status_in_its_span(
    tmp_path: Path, tokens: Path, collector: tuple[Collector, str], caplog: pytest.LogCaptureFixture
) -> None:
    tracing = open_tracing(collector[1], "s")
    async with open_chats(tmp_path, tracing=tracing, tokens=tokens) as (served, _):
        for path, body, expected, _ in REFUSED:
            caplog.clear()
            with caplog.at_level(logging.INFO):
                status, answer = await post(served, path, body, **HEADERS)
            records = [record for record in caplog.records if record.name.startswith("tgis.")]
            lines = [record.getMessage() for record in records]
            assert {record.levelname for record in records} == {"WARNING"}, (path, body, lines)
            assert (status, len(lines)) == (expected, 1), (path, body, answer, lines)
            assert json.dumps(body.get("prompt", "-")) not in caplog.text
            shown = [getattr(record, FIELDS) for record in records if hasattr(record, FIELDS)]
            assert not any("adapter_id" in str(line) for line in (*lines, *shown)), (path, body)
            assert not any("new_tokens" in line for line in lines)
        series = served.scene.metrics.render().decode()
    tracing.close()
    spans = [(span.name, values(span.attributes)) for span in collector[0].spans]
    assert [(name, recorded["http.response.status_code"]) for name, recorded in spans] == [
        (f"POST {path}", status) for path, _, status, has_span in REFUSED if has_span
    ]
    assert f'tgi_request_failure_total{{err="validation"}} {len(spans)}.0\n' in series


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_span_has_the_scheme_of_the_connection(scheme: str) -> None:
    headers = [(b"x-request-id", b"\xff"), (b"traceparent", TRACEPARENT.encode())]
    request = Request({"type": "http", "scheme": scheme, "headers": headers, "client": ("::1", 5)})
    call = open_call(request, "team-7", BodyReader(1, BodyLimits()))
    assert span_protocol(OPENAI).start("Tokenize", call.metadata)["url.scheme"] == scheme
    assert [value for name, value in call.metadata if name == "x-request-id"] == [call.id]
    assert (call.connection, call.tenant, call.id.isascii()) == ("::1:5", "team-7", True)
