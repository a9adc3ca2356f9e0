"""Tests the service's parameters for each field of a request."""

import json
from typing import Any

import msgspec
import pytest

from tgis.router.api.http.fields.described_fields import describe_parameters
from tgis.router.api.openai.chat.types import ChatRequest
from tgis.router.api.openai.completions.types import CompletionRequest
from tgis.router.api.openai.errors import OPENAI_ERRORS, ApiError, describe
from tgis.router.api.openai.fields.parameters import to_parameters
from tgis.router.api.openai.fields.refusals import INPUT, translated_refusals
from tgis.router.api.openai.fields.sampling_fields import decode_fields
from tgis.router.errors import (
    GenerationError,
    InputTooLongError,
    NotFoundError,
    OverloadedError,
    PayloadTooLargeError,
    RequestError,
    UnavailableError,
)
from tgis.router.requests.parameters import Parameters

DECODER = msgspec.json.Decoder(CompletionRequest)
NOTHING = Parameters(sample=True, include_stop_sequence=False, raw_details=True)


def read(**fields: Any) -> CompletionRequest:
    return decode_fields(DECODER, json.dumps(fields).encode())


CASES: list[tuple[str, Any, str, Any]] = [
    ("temperature", 0, "temperature", 0.0),
    ("temperature", 0.7, "temperature", 0.7),
    ("top_p", 0.5, "top_p", 0.5),
    ("top_k", -1, "top_k", 0),
    ("top_k", 0, "top_k", 0),
    ("top_k", 7, "top_k", 7),
    ("min_p", 0.25, "min_p", 0.25),
    ("seed", 0, "seed", 0),
    ("seed", -3, "seed", 2**64 - 3),
    ("seed", -(2**63), "seed", 2**63),
    ("seed", 2**64 - 1, "seed", 2**64 - 1),
    ("repetition_penalty", 1.5, "repetition_penalty", 1.5),
    ("presence_penalty", -2, "presence_penalty", -2.0),
    ("frequency_penalty", 2, "frequency_penalty", 2.0),
    ("logit_bias", {"5": 1, "17": -100}, "logit_bias", ((5, 1.0), (17, -100.0))),
    ("stop", "a", "stop_sequences", ("a",)),
    ("stop", ["a", "b"], "stop_sequences", ("a", "b")),
    ("include_stop_str_in_output", True, "include_stop_sequence", True),
    ("stop_token_ids", [3, 4], "stop_token_ids", (3, 4)),
    ("ignore_eos", True, "ignore_eos", True),
    ("min_tokens", 3, "min_new_tokens", 3),
    ("truncate_prompt_tokens", 3, "truncate_input_tokens", 3),
    ("n", 3, "n", 3),
    ("cache_salt", "é", "cache_salt", "é".encode()),
    ("priority", -5, "priority", -5),
    ("user", "somebody", "n", 1),
    ("unknown", [1], "n", 1),
]


@pytest.mark.parametrize(("field", "value", "name", "expected"), CASES)
def test_fields(field: str, value: Any, name: str, expected: Any) -> None:
    params = to_parameters(read(**{field: value}), None)
    assert getattr(params, name) == expected
    others = {each: getattr(params, each) for each in vars(NOTHING) if each != name}
    assert others == {each: value for each, value in vars(NOTHING).items() if each != name}


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**30])
def test_seeds_of_more_than_64_bits_are_refused(seed: int) -> None:
    with pytest.raises(ApiError) as caught:
        to_parameters(read(seed=seed), None)
    text = "seed must be >= -9223372036854775808 and <= 18446744073709551615"
    assert (str(caught.value), caught.value.status, caught.value.param) == (text, 400, "seed")


def test_null_is_nothing() -> None:
    fields = {info.name: None for info in msgspec.structs.fields(CompletionRequest)}
    assert to_parameters(read(**fields), None) == NOTHING


def test_details() -> None:
    params = to_parameters(read(n=2), 5, n=7, top_n_tokens=3)
    assert (params.max_new_tokens, params.n, params.top_n_tokens) == (5, 7, 3)


def test_description() -> None:
    fields = {
        "model": "secret",
        "prompt": "secret",
        "stop": ["secret"],
        "user": "secrets",
        "logit_bias": {"1": 2, "3": 4},
        "temperature": 0.5,
        "echo": True,
        "n": 2,
        "stream_options": {"include_usage": True},
        "guided_json": {"secret": 1},
    }
    text = describe_parameters(read(**fields))
    assert "secret" not in text
    assert set(text.split(", ")) == {
        "stop=1",
        "user=7 bytes",
        "logit_bias=2",
        "temperature=0.5",
        "echo=true",
        "n=2",
        "stream_options.include_usage=true",
        "guided_json=1",
    }


def translated(error: RequestError, model: str | None = None) -> ApiError:
    names = {INPUT: "prompt", "regex": "guided_regex"}
    with pytest.raises(ApiError) as caught, translated_refusals(model, names):
        raise error
    return caught.value


MAX_TOKENS_TEXT = "max_new_tokens must be <= 5"
REFUSALS: list[tuple[RequestError, str | None, str | None, str]] = [
    (RequestError(MAX_TOKENS_TEXT, "max_new_tokens"), "max_tokens", None, "max_tokens must be <= 5"),
    (
        RequestError("min_new_tokens must be <= max_new_tokens", "min_new_tokens"),
        "min_tokens",
        None,
        "min_tokens must be <= max_tokens",
    ),
    (RequestError("the text is wrong", "text"), "prompt", None, "the text is wrong"),
    (
        InputTooLongError("input tokens (9) plus min_new_tokens (2) must be <= 5", 9),
        "prompt",
        "context_length_exceeded",
        "This model's maximum context length is exceeded: input tokens (9) plus min_tokens (2) must be <= 5",
    ),
    (RequestError("n must be >= 1", "n"), "n", None, "n must be >= 1"),
    (RequestError("something else"), None, None, "something else"),
    (RequestError("regex no: regex", "regex", "regex no"), "guided_regex", None, "guided_regex no: regex"),
]


@pytest.mark.parametrize(("error", "param", "code", "message"), REFUSALS)
def test_refusals(error: RequestError, param: str | None, code: str | None, message: str) -> None:
    for error.is_logged in (False, True):
        shown = translated(error)
        assert shown.is_logged == error.is_logged
        details = describe(shown)[1]
        assert (shown.status, details.param, details.code, details.message) == (400, param, code, message)


@pytest.mark.parametrize(
    ("error", "status", "kind", "is_temporary"),
    [
        (OverloadedError("x"), 429, "rate_limit_error", True),
        (UnavailableError("x"), 503, "service_unavailable_error", True),
        (PayloadTooLargeError(5), 413, "invalid_request_error", False),
        (RequestError("x"), 400, "invalid_request_error", False),
        (GenerationError("x"), 500, "server_error", False),
        (ApiError(401, "x"), 401, "authentication_error", False),
    ],
)
def test_answers_to_errors(error: Exception, status: int, kind: str, is_temporary: bool) -> None:
    response = OPENAI_ERRORS.respond(error)
    details = json.loads(bytes(response.body))["error"]
    assert (response.status_code, details["type"]) == (status, kind)
    assert ("retry-after" in response.headers) == is_temporary


def test_missing_models_stay_missing() -> None:
    shown = translated(NotFoundError("no store in /a/folder"), "x" * 999)
    assert (shown.status, shown.param, shown.code) == (404, "model", "model_not_found")
    assert str(shown) == f"The model '{'x' * 256}' does not exist."


def test_tools_are_described_by_numbers() -> None:
    choice = {"type": "function", "function": {"name": "secret"}}
    tools = [{"function": {"name": "secret", "description": "secret"}}]
    body = msgspec.convert(
        {"messages": [], "tools": tools, "tool_choice": choice, "max_reasoning_tokens": 7}, ChatRequest
    )
    assert describe_parameters(body) == (
        "tools=1, tool_choice.type=8 bytes, tool_choice.function.name=6 bytes, max_reasoning_tokens=7"
    )
