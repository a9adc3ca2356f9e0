"""Tests which requests browser pages may send. Requests of other clients are served."""

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from tests.support.http_exchange import HttpReply, exchange
from tests.support.router.served_chats import open_chats
from tests.support.router.served_http import ServedHttp
from tgis.config.processes import RouterConfig
from tgis.router.api.http.errors import HttpError
from tgis.router.api.http.serving.origins import FOREIGN_HOST, FOREIGN_ORIGIN, OriginRules

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
BODY = {"prompt": "a", "max_tokens": 1}
OWN = "http://127.0.0.1:PORT"
LOCAL, TOKEN = {"bind": "127.0.0.1"}, {"authorization": "Bearer secret"}


async def send(
    served: ServedHttp, path: str = "/v1/completions", body: Any = None, **headers: str
) -> HttpReply:
    """Send a body with headers, in which PORT stands for the port, and underscores for dashes."""
    port = served.url.rpartition(":")[2]
    given = {name.replace("_", "-"): value.replace("PORT", port) for name, value in headers.items()}
    return await asyncio.to_thread(exchange, served.url + path, body or BODY, given)


PAGES: list[tuple[dict[str, str], int]] = [
    ({}, 200),
    ({"origin": OWN}, 200),
    ({"origin": OWN.upper()}, 200),
    ({"origin": OWN, "sec_fetch_site": "same-origin"}, 200),
    ({"sec_fetch_site": "none"}, 200),
    ({"origin": "https://service.example", "sec_fetch_site": "same-origin"}, 200),  # behind a proxy
    ({"origin": "https://127.0.0.1:PORT"}, 200),  # behind a proxy with TLS
    ({"origin": "http://allowed.example", "sec_fetch_site": "cross-site"}, 200),
    ({"origin": "http://allowed.example"}, 200),
    ({"origin": "http://evil.example"}, 403),
    ({"origin": "http://evil.example", "sec_fetch_site": "cross-site"}, 403),
    ({"origin": "http://127.0.0.1:1"}, 403),
    ({"origin": "http://localhost:PORT"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": OWN, "sec_fetch_site": "cross-site"}, 403),
    ({"origin": OWN, "sec_fetch_site": "same-site"}, 403),
    ({"sec_fetch_site": "cross-site"}, 403),
    ({"origin": "http://allowed.example.evil.example"}, 403),
    ({"origin": "http://allowed.example, http://evil.example"}, 403),
]


async def test_pages_of_other_origins_are_refused(tmp_path: Path) -> None:
    options = {"cors_allow_origin": "https://other.example, http://allowed.example/"}
    async with open_chats(tmp_path, port_options=options) as (served, _):
        for headers, status in PAGES:
            served.handle.specs.clear()
            reply = await send(served, **headers)
            assert reply.status == status, (headers, reply.text)
            if status == 403:
                assert reply.json["error"]["message"] == FOREIGN_ORIGIN
                assert not served.handle.specs, "nothing is computed"


async def test_all_origins_may_be_allowed(tmp_path: Path) -> None:
    async with open_chats(tmp_path, port_options={"cors_allow_origin": "*", **LOCAL}) as (served, _):
        assert (await send(served, origin="null", host="evil.example")).status == 200


async def test_a_token_does_not_make_a_page_welcome(tmp_path: Path) -> None:
    """A page without a token is refused for the missing token."""
    tokens = tmp_path / "tokens"
    tokens.write_text("secret\n")
    async with open_chats(tmp_path, tokens=tokens, port_options=LOCAL) as (served, _):
        evil = {"origin": "http://evil.example"}
        assert [(await send(served, **evil, **more)).status for more in ({}, TOKEN)] == [401, 403]
        assert (await send(served, host="service.example", **TOKEN)).status == 200


FORMS: dict[str, tuple[str, Any]] = {
    "openai": (
        "/v1/load_lora_adapter",
        {"error": {"message": FOREIGN_ORIGIN, "type": "permission_error", "param": None, "code": None}},
    ),
    "tgi": ("/generate", {"error": FOREIGN_ORIGIN, "error_type": "validation"}),
    "lmi": ("/invocations", {"code": 403, "type": "ForbiddenException", "message": FOREIGN_ORIGIN}),
}


@pytest.mark.parametrize("api", FORMS)
async def test_each_api_has_its_form(api: str, tmp_path: Path) -> None:
    path, error = FORMS[api]
    evil = {"origin": "http://evil.example"}
    async with open_chats(tmp_path, http_api=api) as (served, _):
        for kind in (JSON, "text/plain"):
            reply = await send(served, path, {"inputs": "a"}, content_type=kind, **evil)
            assert (reply.status, reply.json) == (403, error)
        models = await asyncio.to_thread(exchange, f"{served.url}/v1/models", None, evil)
        assert models.status == 200, "pages cannot read it, and it changes nothing"
        assert "access-control-allow-origin" not in models.headers


KINDS = [
    (JSON, 200, 200),
    ("application/json; charset=utf-8", 200, 200),
    ("application/vnd.api+json", 200, 200),
    ("", 200, 200),
    (FORM, 200, 415),
    ("text/plain", 415, 415),
    ("text/plain;charset=UTF-8", 415, 415),
    ("multipart/form-data; boundary=x", 415, 415),
    ("application/octet-stream", 415, 415),
]
"""Statuses for each media type, from other clients and from pages."""


async def test_bodies_that_are_not_json_are_refused(tmp_path: Path) -> None:
    async with open_chats(tmp_path) as (served, _):
        for path, body in (
            ("/v1/completions", BODY),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [5]}),
        ):
            for kind, *statuses in KINDS:
                pages: list[dict[str, str]] = [{}, {"origin": OWN}]
                replies = [await send(served, path, body, content_type=kind, **page) for page in pages]
                assert [reply.status for reply in replies] == statuses, (path, kind)


async def test_curl_needs_no_header(tmp_path: Path) -> None:
    async with open_chats(tmp_path) as (served, _):
        command = ["curl", "-s", f"{served.url}/v1/completions", "-d", json.dumps(BODY)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        answer, _ = await process.communicate()
        assert json.loads(answer)["object"] == "text_completion"


HOSTS = {
    "evil.example": 403,
    "evil.example:80": 403,
    "127.0.0.1.evil.example": 403,
    "localhost.evil.example": 403,
    "evil.example.": 403,
    "machine": 200,
    "127.0.0.1": 200,
    "10.0.0.7:8000": 200,
    "[::1]:8000": 200,
    "localhost:8000": 200,
    "LOCALHOST.": 200,
    "model.localhost": 200,
    "host.docker.internal:3000": 200,
    "allowed.example:8443": 200,
}


async def test_names_that_strangers_can_point_to_loopback_are_refused(tmp_path: Path) -> None:
    options = {"cors_allow_origin": "https://allowed.example", **LOCAL}
    async with open_chats(tmp_path, port_options=options) as (served, _):
        for host, status in HOSTS.items():
            pages: list[dict[str, str]] = [
                {},
                {"origin": f"http://{host}", "sec_fetch_site": "same-origin"},
            ]
            for page in pages:
                reply = await send(served, host=host, **page)
                assert reply.status == status, (host, reply.text)
                if status == 403:
                    assert reply.json["error"]["message"] == FOREIGN_HOST
            models = await asyncio.to_thread(exchange, f"{served.url}/v1/models", None, {"host": host})
            assert models.status == status, host


@pytest.mark.parametrize(
    ("options", "is_refused"),
    [
        (LOCAL, True),
        ({"bind": "::1"}, True),
        ({"bind": "localhost"}, True),
        ({"bind": "0.0.0.0"}, False),
        ({"auth_tokens_path": "tokens", **LOCAL}, False),
        ({"tls_client_ca_cert_path": "ca.crt", **LOCAL}, False),
        ({"cors_allow_origin": "*", **LOCAL}, False),
    ],
)
def test_names_are_looked_at_where_anybody_may_call(options: dict[str, str], is_refused: bool) -> None:
    rules = OriginRules(RouterConfig(tokenizer_path="", **options))  # type: ignore[arg-type]
    with pytest.raises(HttpError) if is_refused else nullcontext():
        rules.check("GET", Headers({"host": "evil.example"}))


async def test_a_plain_text_of_lmi_is_not_looked_at_as_json(tmp_path: Path) -> None:
    async with open_chats(tmp_path, http_api="lmi,tgi") as (served, _):
        text = b"[" * 70 + b"a," * 2_000
        reply = await asyncio.to_thread(
            exchange, f"{served.url}/invocations", text[:150], {"content-type": "text/plain"}
        )
        assert reply.status == 200, reply.text
