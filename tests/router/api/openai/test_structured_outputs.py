"""Tests constraints over a real socket: the engine's grammar, and the field that a refusal names."""

from pathlib import Path
from typing import Any

from tests.support.router.served_chats import HELLO, open_chats, post

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STATED: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, "format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        "json_schema",
    ),
    ({"guided_json": SCHEMA}, "json_schema"),
    ({"guided_regex": "a+"}, "regex"),
    ({"guided_choice": ["only"]}, "choice"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice"),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar"),
    ({"structured_outputs": {"json_object": True}}, "format"),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_json": {"type": "nothing"}}, "guided_json"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/a"}}}},
        "response_format",
    ),
]


async def test_constraints_and_refusals(tmp_path: Path) -> None:
    async with open_chats(tmp_path) as (served, _):
        for fields, field in STATED:
            served.handle.specs.clear()
            body = {"messages": HELLO, "max_tokens": 1} | fields
            status, answer = await post(served, "/v1/chat/completions", body)
            assert status == 200, (fields, answer)
            grammar = served.handle.specs[0].grammar
            assert (None if grammar is None else grammar.field) == field
        for fields, param in REFUSED:
            body = {"prompt": "a", "messages": HELLO, "max_tokens": 1} | fields
            for path in ("/v1/chat/completions", "/v1/completions"):
                status, answer = await post(served, path, body)
                assert (status, answer["error"]["param"]) == (400, param), (fields, answer)
