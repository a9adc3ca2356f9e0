"""Tests tenants of OpenAI's API on its own TLS port: names in tokens and certificates reach the log, the
spans and the cache salt."""

import json
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.router.router_process import Setup, start_router, stop_router
from tests.support.tls_files import Files
from tests.support.trace_collector import Collector, values
from tgis.net.ports import reserve

TOKENS = "tenant acme t-1\ntenant acme t-2\ntenant globex t-3\nplain\n"
ALICE, BOB = "alice@example.com", "bob.example.com"
# Token, name in the certificate, and tenant of each caller, in the order of their calls.
CALLERS = [
    ("t-1", ALICE, "acme"),
    ("t-2", BOB, "acme"),
    ("t-3", ALICE, "globex"),
    ("plain", ALICE, ALICE),
    ("plain", BOB, BOB),
]
TEXT = "The quick brown fox jumps over the lazy dog. " * 2
PROMPT: dict[str, Any] = {"prompt": TEXT}
# Name, kind and fields of each call. Calls of one kind have equal prompts.
CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("whole", "completions", PROMPT),
    ("streamed", "completions", PROMPT | {"stream": True, "stream_options": {"include_usage": True}}),
    ("chat", "chat", {"messages": [{"role": "user", "content": TEXT}]}),
]


@pytest.fixture
def served(tmp_path: Path, files: Files, collector: tuple[Collector, str]) -> Iterator[tuple[Setup, str]]:
    """Yield the router and the URL of its API."""
    tokens, template = tmp_path / "tokens", tmp_path / "chat.jinja"
    tokens.write_text(TOKENS)
    template.write_text("{{ messages[0].content }}")
    with reserve("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    flags = ["--http-api", "openai", "--http-api-port", str(port), *files.flags("cert", "key", "ca")]
    flags += ["--auth-tokens-path", str(tokens), "--chat-template", str(template)]
    flags += ["--json-output", "--otlp-endpoint", f"http://{collector[1]}"]
    setup = start_router(tmp_path, 1, *flags)
    yield setup, f"https://127.0.0.1:{port}/v1"
    stop_router(setup)


@contextmanager
def connect(url: str, files: Files, token: str, certificate: str) -> Iterator[openai.OpenAI]:
    context = ssl.create_default_context(cafile=str(files.directory / "ca.pem"))
    files.authority.issue_cert(certificate).configure_cert(context)
    with openai.DefaultHttpxClient(verify=context) as http_client:
        yield openai.OpenAI(base_url=url, api_key=token, max_retries=0, http_client=http_client)


def ask(client: openai.OpenAI, call_id: str, kind: str, fields: dict[str, Any]) -> int:
    """Return the number of cached prompt tokens."""
    create: Any = client.chat.completions.create if kind == "chat" else client.completions.create
    answer = create(model="", max_tokens=2, extra_headers={"x-request-id": call_id}, **fields)
    if "stream" in fields:
        *_, answer = answer
    num_cached: int = answer.usage.prompt_tokens_details.cached_tokens
    return num_cached


def test_tenants_are_reported_and_share_only_their_own_prefixes(
    served: tuple[Setup, str], files: Files, collector: tuple[Collector, str]
) -> None:
    setup, url = served
    tenants: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    with ExitStack() as stack:
        for i, (token, certificate, tenant) in enumerate(CALLERS):
            client = stack.enter_context(connect(url, files, token, certificate))
            for name, kind, fields in CALLS:
                call_id = f"{name}-{i}"
                assert (ask(client, call_id, kind, fields) > 0) == ((tenant, kind) in seen), (call_id, tenant)
                seen.add((tenant, kind))
                tenants[call_id] = tenant
            with pytest.raises(openai.BadRequestError):
                ask(client, f"refused-{i}", "completions", PROMPT | {"temperature": 9})
    assert spans_of(collector[0], len(tenants)) == tenants
    stop_router(setup)
    refused = {f"refused-{i}": caller[2] for i, caller in enumerate(CALLERS)}
    assert lines_of(setup) == tenants | refused


def spans_of(collector: Collector, least: int) -> dict[object, object]:
    """Return the tenant of each call with a span."""
    deadline = time.monotonic() + 20
    while len(spans := collector.spans) < least:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    attributes = [values(span.attributes) for span in spans]
    return {each["tgis.correlation_id"]: each["tgis.tenant"] for each in attributes}


def lines_of(setup: Setup) -> dict[object, object]:
    """Return the tenant of each call with a line in the log."""
    entries = (json.loads(line) for line in setup.service.output.splitlines() if line.startswith("{"))
    return {each["correlation_id"]: each.get("tenant") for each in entries if each.get("api") == "openai"}
