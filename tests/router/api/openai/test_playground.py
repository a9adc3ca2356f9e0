"""Tests the playground's page as a client without a browser receives it. integration_tests/playground opens
it in Chromium."""

import asyncio
import http.client
import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tgis.router.api.openai.playground.page as playground
from tests.support.router.http_ports import API, HTTP, open_ports
from tgis.config.checks import Setting, SettingsError, check

# Code that turns text into elements or code, sends requests to other hosts, or stores text.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|setHTML|srcdoc"
    r"|\beval\b|\bFunction\(|setTimeout\(\s*[\"'`]|\bimport\b|javascript:|https?://|//cdn"
    r"|localStorage|sessionStorage|indexedDB|\.cookie|\bcaches\b"
)


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str

    @property
    def error(self) -> str:
        message: str = json.loads(self.text)["error"]["message"]
        return message


async def get(port: int, path: str = "/playground", method: str = "GET") -> Answer:
    def ask() -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, headers, response.read().decode())
        finally:
            connection.close()

    return await asyncio.to_thread(ask)


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def inside(text: str, tag: str) -> list[str]:
    contents: list[str] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return contents


def hashes_of(text: str, tag: str) -> str:
    digests = (sha256(each.encode()).digest() for each in inside(text, tag))
    return " ".join(f"'sha256-{b64encode(digest).decode()}'" for digest in digests)


async def test_policy_names_the_style_and_the_script_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("a-token\n")
    async with open_ports(playground=True, auth_tokens_path=str(tmp_path / "tokens")) as ports:
        assert (await get(ports[HTTP], "/v1/models")).status == 401
        answer, head = await get(ports[HTTP]), await get(ports[HTTP], method="HEAD")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert (head.status, head.text) == (200, "")
    assert set(answer.headers["content-security-policy"].split("; ")) == {
        "default-src 'none'",
        f"style-src {hashes_of(answer.text, 'style')}",
        f"script-src {hashes_of(answer.text, 'script')}",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    }
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


async def test_page_makes_no_text_into_elements_and_loads_nothing() -> None:
    async with open_ports(playground=True) as ports:
        text = (await get(ports[HTTP])).text
    library, own = inside(text, "script")
    assert FORBIDDEN.findall(text.replace(library, "")) == []
    assert set(FORBIDDEN.findall(library)) == {"http://", "https://"}, "prefixes of links, and its comments"
    assert own
    tags = Tags(text).tags
    assert {tag for tag, _ in tags} & {"link", "img", "iframe", "object", "embed", "base", "form"} == set()
    names = {name for _, attributes in tags for name in attributes}
    assert not [name for name in names if name.startswith("on") or name in ("src", "href", "style")]


async def test_page_is_whole_and_its_controls_have_labels() -> None:
    async with open_ports(playground=True) as ports:
        text = (await get(ports[HTTP])).text
    folder = Path(playground.__file__).parent
    for file in [*folder.glob("*.js"), folder / "page.css"]:
        assert file.read_text() in text
    tags = Tags(text).tags
    labelled = {attributes["for"] for tag, attributes in tags if tag == "label"}
    controls = {attributes["id"] for tag, attributes in tags if tag in ("input", "select", "textarea")}
    assert controls == labelled
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:byId|fieldById|readJson)\("([\w-]+)"\)', text))
    assert used <= set(ids)


async def test_page_is_where_its_api_is() -> None:
    async with open_ports(playground=True, http_api_port=0) as ports:
        elsewhere, page = await get(ports[HTTP]), await get(ports[API])
    assert page.status == 200
    assert elsewhere.status == 404
    assert "--http-api-port" in elsewhere.error


@pytest.mark.parametrize("options", [{"api": None}, {}, {"http_api_port": 0}])
async def test_page_that_is_not_chosen_says_how_to_choose_it(options: dict[str, Any]) -> None:
    async with open_ports(**options) as ports:
        answers = [await get(port) for port in ports.values()]
    assert len(answers) == 1 + ("http_api_port" in options)
    for answer in answers:
        assert answer.status == 404
        assert "--http-api openai and --playground" in answer.error


def test_page_without_its_api_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"playground: .* --http-api openai"):
        check({"playground": Setting(True), "http_api": Setting(None)}, ("openai",), ("fmaas",))
