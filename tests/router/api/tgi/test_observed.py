"""Tests the logs, spans and metrics of TGI's routes over a real socket, with a real collector of traces."""

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.router.served_inputs import call, inputs
from tests.support.router.served_tgi import open_tgi
from tests.support.trace_collector import TRACEPARENT, Collector, values
from tgis.logs import FIELDS
from tgis.router.requests.tracing import open_tracing

PLAIN = inputs(max_new_tokens=2)
ASKS: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", PLAIN, "Generate"),
    ("/generate_stream", PLAIN, "GenerateStream"),
    ("/", PLAIN, "GenerateAny"),
    ("/", PLAIN | {"stream": True}, "GenerateAny"),
    ("/invocations", PLAIN, "Invocation"),
    ("/invocations", {"prompt": "a", "max_tokens": 2}, "Completion"),
    ("/tokenize", {"inputs": "a"}, ""),
    ("/chat_tokenize", {"messages": [{"role": "user", "content": "a"}]}, ""),
]
OPENAIS = {"Completion": "/v1/completions"}
# Status and span of each request. A request without a span is refused before the service.
REFUSED: list[tuple[str, dict[str, Any], int, bool]] = [
    ("/generate", inputs(temperature=0), 422, True),
    ("/generate", inputs(temperature="a"), 422, False),
    ("/generate", inputs(max_new_tokens=999), 422, True),
    ("/generate", inputs(adapter_id="nobody"), 404, True),
    ("/generate_stream", inputs(temperature=0), 200, True),
    ("/generate_stream", inputs(adapter_id="nobody"), 200, True),
    ("/chat_tokenize", {"messages": []}, 422, False),
    ("/invocations", {}, 422, False),
]


async def test_spans_and_lines_of_each_route(
    tmp_path: Path, collector: tuple[Collector, str], caplog: pytest.LogCaptureFixture
) -> None:
    tracing = open_tracing(collector[1], "s")
    with caplog.at_level(logging.INFO):
        async with open_tgi(tmp_path, tracing=tracing) as served:
            for number, (path, body, _) in enumerate(ASKS):
                answer = await call(
                    served, path, body, **{"traceparent": TRACEPARENT, "x-request-id": f"id-{number}"}
                )
                assert (answer.status, answer.headers["x-request-id"]) == (200, f"id-{number}")
            series = served.scene.metrics.render().decode()
    tracing.close()
    spans = [(span.name, values(span.attributes)) for span in collector[0].spans]
    assert [name for name, _ in spans] == [f"POST {OPENAIS.get(kind, path)}" for path, _, kind in ASKS]
    assert all(answer["http.response.status_code"] == 200 for _, answer in spans)
    assert [answer.get("gen_ai.usage.output_tokens") for _, answer in spans] == [2] * 6 + [None] * 2
    lines = [getattr(record, FIELDS) for record in caplog.records if hasattr(record, FIELDS)]
    assert [(line["api"], line["method"], line["correlation_id"]) for line in lines] == [
        ("openai" if kind in OPENAIS else "tgi", kind, f"id-{number}")
        for number, (_, _, kind) in enumerate(ASKS)
        if kind
    ]
    for path in {path for path, _, _ in ASKS}:
        count = sum(asked == path for asked, _, _ in ASKS)
        line = f'tgi_http_api_request_count_total{{api="tgi",code="200",route="{path}"}} {count}.0'
        assert line in series.splitlines()


async def test_each_refusal_has_one_line_and_its_status(
    tmp_path: Path, collector: tuple[Collector, str], caplog: pytest.LogCaptureFixture
) -> None:
    tracing = open_tracing(collector[1], "s")
    async with open_tgi(tmp_path, tracing=tracing) as served:
        for path, body, expected, _ in REFUSED:
            caplog.clear()
            with caplog.at_level(logging.INFO):
                answer = await call(served, path, body)
            records = [record for record in caplog.records if record.name.startswith("tgis.")]
            lines = [record.getMessage() for record in records]
            assert {record.levelname for record in records} == {"WARNING"}, (path, body, lines)
            assert (answer.status, len(lines)) == (expected, 1), (path, body, answer, lines)
    tracing.close()
    spans = [(span.name, values(span.attributes)) for span in collector[0].spans]
    assert [(name, answer["http.response.status_code"]) for name, answer in spans] == [
        (f"POST {path}", status) for path, _, status, has_span in REFUSED if has_span
    ]
    assert all("error.type" in answer for _, answer in spans)


async def test_tokens_of_a_text_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tgis.router.text.token_lists.MAX_PLACES", 3)
    async with open_tgi(tmp_path) as served:
        assert (await call(served, "/tokenize", {"inputs": "The quick"})).status == 200
        answer = await call(served, "/tokenize", {"inputs": "The quick brown"})
        error = "Input validation error: the text has more than 3 tokens"
        assert (answer.status, answer.json) == (422, {"error": error, "error_type": "validation"})
