"""Tests the streams of all APIs with a reader that splits at every line end of `str.splitlines`."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.router.fake_shard import EOS
from tests.support.router.served_chats import HELLO
from tests.support.router.served_http import MODEL, ServedHttp
from tests.support.router.served_inputs import call, inputs, open_inputs
from tgis.router.api.lmi.chat_lines import ChatLineErrors
from tgis.router.api.lmi.errors import LmiErrors
from tgis.router.api.openai.errors import OPENAI_ERRORS
from tgis.router.api.tgi.errors import TGI_ERRORS
from tgis.router.errors import RequestError

LINE_ENDS = [line[-1] for line in "".join(map(chr, range(sys.maxunicode + 1))).splitlines(keepends=True)[:-1]]
TEXT = "".join(f"a{mark}é" for mark in LINE_ENDS)
NUM_TOKENS = 100
OPENAI: dict[str, Any] = {"model": MODEL, "max_tokens": NUM_TOKENS, "stream": True}
CHAT = OPENAI | {"messages": HELLO}
COMPLETION = OPENAI | {"prompt": TEXT}
SCORED = COMPLETION | {"echo": True, "logprobs": 2}
INPUTS = inputs(TEXT, max_new_tokens=NUM_TOKENS, details=True, return_full_text=True)
STREAM = INPUTS | {"stream": True}


def read_lines(body: bytes) -> list[Any]:
    """Return the objects in the lines, which are one-line events or bare objects."""
    lines = [line.removeprefix("data:").strip(" ") for line in body.decode().splitlines()]
    return [json.loads(line) for line in lines if line not in ("", "[DONE]")]


def text_of(line: Any) -> str:
    if "token" in line:
        return (
            "" if line["token"].get("special_token", line["token"].get("special")) else line["token"]["text"]
        )
    return "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in line["choices"])


def script(served: ServedHttp) -> None:
    ids = served.tokenizer.fast.encode(TEXT, add_special_tokens=False).ids
    served.scene.shard.model.script = [*ids, EOS]


def test_there_are_such_characters() -> None:
    assert {"\n", "\v", "\x1e", "\x85", "\u2028", "\u2029"} <= set(LINE_ENDS)


@pytest.mark.parametrize(
    ("api", "formatter", "requests"),
    [
        (
            "openai",
            None,
            {
                "/v1/chat/completions": [CHAT, CHAT | {"logprobs": True, "top_logprobs": 2}],
                "/v1/completions": [COMPLETION, SCORED],
            },
        ),
        ("tgi", None, {"/generate_stream": [INPUTS], "/": [STREAM]}),
        ("lmi", None, {"/invocations": [STREAM, CHAT, COMPLETION, SCORED]}),
        ("lmi", "sse", {"/invocations": [INPUTS]}),
        ("lmi", "tgi_compat", {"/invocations": [STREAM]}),
    ],
)
async def test_events_are_lines(
    tmp_path: Path, api: str, formatter: str | None, requests: dict[str, list[Any]]
) -> None:
    async with open_inputs(tmp_path, api, lmi_output_formatter=formatter) as served:
        script(served)
        for path, bodies in requests.items():
            for body in bodies:
                answer = await call(served, path, body)
                assert answer.status == 200, answer.text
                lines = read_lines(answer.body)
                before = TEXT if body.get("echo") else ""
                assert "".join(map(text_of, lines)) == before + TEXT
                if "inputs" in body:
                    assert lines[-1]["generated_text"] == TEXT + TEXT


@pytest.mark.parametrize("form", [OPENAI_ERRORS, TGI_ERRORS, LmiErrors(MODEL), ChatLineErrors(OPENAI_ERRORS)])
def test_errors_are_lines(form: Any) -> None:
    [line] = read_lines(form.last_events(RequestError(TEXT)))
    error = line["error"]
    assert (error["message"] if isinstance(error, dict) else error).endswith(TEXT)
