"""Tests the counts of answers by route and status over a real socket, and the log lines of refusals."""

import asyncio
import http.client
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tgis.log_limits import KIND
from tgis.logs import FIELDS
from tgis.router.api.http.call_context import open_call
from tgis.router.api.http.http_api import HttpApi
from tgis.router.api.http.json_bodies import BodyReader
from tgis.router.api.http.json_structure import BodyLimits
from tgis.router.api.http.serving.answer_accounts import AnswerAccounts
from tgis.router.api.openai.errors import OPENAI_ERRORS, ApiError
from tgis.router.api.openai.rules import OPENAI
from tgis.router.errors import GenerationError, RequestError, UnavailableError
from tgis.router.metrics.metrics import MetricLimits, Metrics

MARK = "a-text-nobody-may-see"
LOGGER = "tgis.router.api.http.serving.answer_accounts"


class Api:
    """Routes that fail like a real API's routes."""

    def __init__(self) -> None:
        self.metrics = Metrics(MetricLimits(64, 32, 4))

    async def echo(self, request: Request) -> Response:
        request.state.call = open_call(request, "team-7", BodyReader(1 << 20, BodyLimits()))
        match (await request.body()).decode():
            case "bad":
                return OPENAI_ERRORS.respond(ApiError(400, f"no {MARK}", "max_tokens", MARK, "no tokens"))
            case "template":
                return OPENAI_ERRORS.respond(RequestError(MARK, log_text="a broken rule"))
            case "closing":
                return OPENAI_ERRORS.respond(UnavailableError("the service is shutting down"))
            case "logged":
                error = GenerationError(MARK)
                error.is_logged = True
                return OPENAI_ERRORS.respond(error)
        return Response(MARK)

    async def plain_stream(self, request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"1"

        return StreamingResponse(parts())

    def count(self, name: str) -> dict[str, float]:
        lines = self.metrics.render().decode().splitlines()
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)
        }

    @asynccontextmanager
    async def served(self) -> AsyncIterator[int]:
        routes = [
            Route("/v1/echo", self.echo, methods=["POST"]),
            Route("/v1/plain", self.plain_stream),
        ]
        app = AnswerAccounts(Starlette(routes=routes), [HttpApi(OPENAI, routes, OPENAI_ERRORS)], self.metrics)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
        listener = socket.create_server(("127.0.0.1", 0))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task
            listener.close()


async def ask(port: int, path: str, body: str | None = None, **headers: str) -> int:
    def blocking() -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET" if body is None else "POST", path, body, headers)
            response = connection.getresponse()
            response.read()
            return response.status
        finally:
            connection.close()

    return await asyncio.to_thread(blocking)


async def test_answers_are_counted_by_bounded_routes(caplog: pytest.LogCaptureFixture) -> None:
    api = Api()
    with caplog.at_level(logging.INFO, LOGGER):
        async with api.served() as port:
            assert [await ask(port, "/v1/echo", body) for body in ("", "", "bad")] == [200, 200, 400]
            assert [await ask(port, f"/{MARK}/{i}") for i in range(3)] == [404] * 3
            assert await ask(port, "/v1/plain") == 200
    assert api.count("tgi_http_api_request_count_total") == {
        'tgi_http_api_request_count_total{api="openai",code="200",route="/v1/echo"}': 2,
        'tgi_http_api_request_count_total{api="openai",code="400",route="/v1/echo"}': 1,
        'tgi_http_api_request_count_total{api="openai",code="404",route="other"}': 3,
        'tgi_http_api_request_count_total{api="openai",code="200",route="/v1/plain"}': 1,
    }
    assert MARK not in api.metrics.render().decode()


async def test_a_refusal_before_the_service_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    api = Api()
    with caplog.at_level(logging.INFO, LOGGER):
        async with api.served() as port:
            for body in ("good", "bad", "template", "logged"):
                headers = {"x-request-id": "request-1", "authorization": f"Bearer {MARK}"}
                await ask(port, "/v1/echo", body, **headers)
    records = [(record.getMessage(), getattr(record, FIELDS)) for record in caplog.records]
    fields = {
        "api": "openai",
        "method": "/v1/echo",
        "code": 400,
        "correlation_id": "request-1",
        "tenant": "team-7",
    }
    line = "POST /v1/echo is refused with 400: "
    named = fields | {"parameter": "max_tokens"}
    assert records == [(f"{line}no tokens", named), (f"{line}a broken rule", fields)]
    assert MARK not in json.dumps(records)


async def test_a_refusal_without_quotes_has_its_whole_text(caplog: pytest.LogCaptureFixture) -> None:
    api = Api()
    with caplog.at_level(logging.INFO, LOGGER):
        async with api.served() as port:
            assert await ask(port, "/v1/echo", "closing") == 503
    assert caplog.messages == ["POST /v1/echo is refused with 503: the service is shutting down"]


async def test_refusals_of_clients_without_a_token_are_of_one_kind(caplog: pytest.LogCaptureFixture) -> None:
    api = Api()
    with caplog.at_level(logging.INFO, LOGGER):
        async with api.served() as port:
            await ask(port, "/v1/echo", "bad")
            await ask(port, "/v1/echo", "template")
            await ask(port, "/v1/echo", "bad", authorization=f"Bearer {MARK}")
    kinds = [getattr(record, KIND, None) for record in caplog.records]
    assert kinds == ["HTTP refused 400", "HTTP refused 400", None]
