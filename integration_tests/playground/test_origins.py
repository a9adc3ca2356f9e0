"""Requests of pages of other origins in headless Chromium to a service on loopback without tokens."""

import re
import threading
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from integration_tests.playground.browser import open_chromium, open_playground
from integration_tests.support.service import serve
from tests.support.processes import Service
from tests.support.shard.checkpoints import write_llama
from tests.support.tokenizers.trained import write_byte_level

pytestmark = pytest.mark.browser

EVIL = "evil.example"  # a name whose owner resolves it to 127.0.0.1
BODY = '{"prompt": "girl", "max_tokens": 1}'
FETCH = f"""([url, mode, type]) =>
    fetch(url, {{method: 'POST', mode, headers: {{'content-type': type}}, body: {BODY!r}}})
    .then((answer) => answer.status, () => 'refused')"""
BEACON = f"(url) => navigator.sendBeacon(url, new Blob([{BODY!r}]))"
FORM = f"""(url) => {{
    const form = document.createElement('form');
    Object.assign(form, {{method: 'POST', action: url, enctype: 'text/plain'}});
    const field = document.createElement('input');
    Object.assign(field, {{name: '{BODY[:-1]}, "user": "', value: '"}}'}});
    form.append(field);
    document.body.append(form);
    form.submit();
}}"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of the pages of another origin."""
    directory = tmp_path_factory.mktemp("pages")
    (directory / "index.html").write_text("<body></body>")
    handler = partial(SimpleHTTPRequestHandler, directory=str(directory))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, elsewhere: int) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_llama(directory, vocab_size=403, max_position_embeddings=256, eos_token_id=1)
    write_byte_level(directory, 400)
    allowed = f"http://localhost:{elsewhere}"
    flags = ("--http-api", "openai", "--playground", "--cors-allow-origin", allowed)
    for client in serve(directory, "--dtype", "float32", *flags):
        yield client.service


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_chromium(f"--host-resolver-rules=MAP {EVIL} 127.0.0.1") as browser:
        yield browser


def statuses(service: Service) -> dict[str, int]:
    """Return the numbers of completions by status."""
    with urllib.request.urlopen(f"{service.http}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    counts = {}
    for line in lines:
        if line.startswith("tgi_http_api_request") and '"/v1/completions"' in line:
            status = re.search(r'"(\d{3})"', line)
            assert status is not None
            counts[status[1]] = int(float(line.split()[-1]))
    return counts


def test_a_page_of_another_origin_has_nothing_computed(
    service: Service, browser: Any, elsewhere: int
) -> None:
    url = f"{service.http}/v1/completions"
    page = browser.new_page()
    page.goto(f"http://127.0.0.1:{elsewhere}/")
    assert page.evaluate(FETCH, [url, "no-cors", "text/plain"]) == 0, "its answer is not readable"
    assert page.evaluate(FETCH, [url, "cors", "application/json"]) == "refused"
    assert page.evaluate(BEACON, url)
    page.evaluate(FORM, url)
    page.wait_for_url(url)
    assert "permission_error" in page.content()
    assert statuses(service) == {"403": 3}, "one was refused by the browser, which asked before"


def test_a_page_of_an_allowed_origin_is_served(service: Service, browser: Any, elsewhere: int) -> None:
    page = browser.new_page()
    page.goto(f"http://localhost:{elsewhere}/")
    url = f"{service.http}/v1/completions"
    assert page.evaluate(FETCH, [url, "cors", "application/json"]) == 200
    assert page.evaluate(FETCH, [url, "cors", "text/plain"]) == 415


def test_a_page_whose_name_is_pointed_to_loopback_is_refused(service: Service, browser: Any) -> None:
    own = service.http.replace("127.0.0.1", EVIL)
    page = browser.new_page()
    page.goto(f"{own}/live")
    assert page.evaluate(FETCH, ["/v1/completions", "cors", "application/json"]) == 403
    assert page.evaluate("fetch('/v1/models').then((answer) => answer.status)") == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_playground_is_served(service: Service, browser: Any, host: str) -> None:
    own = service.http.replace("127.0.0.1", host)
    with open_playground(browser, own) as playground:
        playground.page.get_by_text("Ready.").wait_for()
        assert playground.page.evaluate(FETCH, ["/v1/completions", "cors", "application/json"]) == 200
