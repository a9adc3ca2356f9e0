"""Tests the sentences about JSON fields that are missing, wrongly typed or out of range."""

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from tgis.router.api.http.fields.invalid_fields import describe_invalid
from tgis.router.api.openai.chat.types import ChatRequest
from tgis.router.api.openai.completions.types import CompletionRequest
from tgis.router.api.tgi.types import GenerateRequest

HELLO = [{"role": "user", "content": "a"}]


class _Other(msgspec.Struct):
    mode: Literal["b", 7] | None = None
    sizes: Annotated[list[int], Meta(max_length=1)] | None = None
    share: Annotated[float, Meta(lt=1)] | None = None


INVALID: list[tuple[type, str, str, str]] = [
    (ChatRequest, "[]", "", "the body must be an object, not a list"),
    (ChatRequest, "null", "", "the body must be an object, not null"),
    (ChatRequest, "{}", "messages", "messages is required"),
    (ChatRequest, '{"messages": null}', "messages", "messages must be a list, not null"),
    (ChatRequest, '{"messages": [{}]}', "messages[0].role", "messages[0].role is required"),
    (ChatRequest, '{"messages": [7]}', "messages[0]", "messages[0] must be an object, not an integer"),
    (
        ChatRequest,
        '{"messages": [{"role": "user"}, {"role": 1.5}]}',
        "messages[1].role",
        "messages[1].role must be a string, not a number",
    ),
    (
        ChatRequest,
        '{"messages": [], "tools": [{"function": {}}], "tool_choice": {"type": "a", "allowed_tools": {}}}',
        "tool_choice.allowed_tools.mode",
        "tool_choice.allowed_tools.mode is required",
    ),
    (
        ChatRequest,
        '{"messages": [], "tool_choice": {"type": "a", "allowed_tools": {"mode": "secret"}}}',
        "tool_choice.allowed_tools.mode",
        "tool_choice.allowed_tools.mode must be auto or required",
    ),
    (
        CompletionRequest,
        '{"temperature": "hot"}',
        "temperature",
        "temperature must be a number, not a string",
    ),
    (CompletionRequest, '{"temperature": 2.5}', "temperature", "temperature must be <= 2.0"),
    (CompletionRequest, '{"temperature": 1e999}', "temperature", "temperature is out of range"),
    (CompletionRequest, '{"top_p": 0}', "top_p", "top_p must be > 0.0"),
    (CompletionRequest, '{"n": 0}', "n", "n must be >= 1"),
    (CompletionRequest, '{"n": 1.0}', "n", "n must be an integer, not a floating-point number"),
    (CompletionRequest, f'{{"n": {2**64}}}', "n", "n must be <= 128"),
    (CompletionRequest, f'{{"n": -{2**64}}}', "n", "n must be >= 1"),
    (CompletionRequest, f'{{"user": {2**64}}}', "user", "user must be a string, not a number"),
    (CompletionRequest, f'{{"stop": -{2**64}}}', "stop", "stop must be a string or a list, not a number"),
    (CompletionRequest, '{"seed": "9"}', "seed", "seed must be an integer, not a string"),
    (CompletionRequest, f'{{"seed": 1{"0" * 5000}}}', "seed", "seed is out of range"),
    (CompletionRequest, '{"stream": 1}', "stream", "stream must be true or false, not an integer"),
    (CompletionRequest, '{"n": true}', "n", "n must be an integer, not a boolean"),
    (CompletionRequest, '{"stop": {}}', "stop", "stop must be a string or a list, not an object"),
    (CompletionRequest, '{"stop": ["a", 1]}', "stop[1]", "stop[1] must be a string, not an integer"),
    (
        CompletionRequest,
        '{"logit_bias": {"secret": "high"}}',
        "logit_bias",
        "each value of logit_bias must be a number, not a string",
    ),
    (
        GenerateRequest,
        '{"inputs": "a", "parameters": {"grammar": {"type": "secret"}}}',
        "parameters.grammar.type",
        "parameters.grammar.type must be json, json_object, json_schema or regex",
    ),
    (_Other, '{"mode": "secret"}', "mode", "mode must be 7 or b"),
    (_Other, '{"sizes": [1, 2]}', "sizes", "sizes is not valid"),
    (_Other, '{"share": 1}', "share", "share must be < 1.0"),
]


@pytest.mark.parametrize(("kind", "body", "path", "text"), INVALID)
def test_a_sentence_names_the_field_by_its_path(kind: Any, body: str, path: str, text: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(body, type=kind)
    assert describe_invalid(caught.value, kind) == (path, text)
