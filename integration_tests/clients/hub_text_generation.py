"""`huggingface_hub.InferenceClient.text_generation` with TGI's API: details, streams, grammars and errors."""

import asyncio
import json
import re
from typing import Any

import huggingface_hub
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import ValidationError

from integration_tests.clients.expectations import TGI_REASONS, Check, Completion, Served, is_close

SCHEMA = {
    "type": "object",
    "properties": {"legs": {"type": "integer", "minimum": 2, "maximum": 4}, "name": {"enum": ["fox", "dog"]}},
    "required": ["legs", "name"],
    "additionalProperties": False,
}
PATTERN = "(fox|dog) [0-9]{2,4}"


def connect(served: Served) -> InferenceClient:
    return InferenceClient(served.root, token=served.api_key, timeout=60)


def greedy(asked: Completion) -> dict[str, Any]:
    """Return the fields of a request whose response is known from transformers.

    The last field keeps the prompt out of the response of a route that returns both whole texts and
    streams."""
    fields = {"max_new_tokens": asked.max_tokens, "do_sample": False, "return_full_text": False}
    return {"prompt": asked.prompt, **fields}


def text_is_generated(served: Served) -> None:
    for asked in served.completions[:6]:
        assert connect(served).text_generation(**greedy(asked)) == asked.text
    given = {**greedy(asked), "return_full_text": None}
    assert connect(served).text_generation(**given) == asked.prompt + asked.text


def text_has_details(served: Served) -> None:
    for asked in served.completions[:4]:
        answer = connect(served).text_generation(**greedy(asked), details=True, decoder_input_details=True)
        details = answer.details
        assert details is not None
        assert answer.generated_text == asked.text
        assert details.finish_reason == TGI_REASONS[asked.finish_reason]
        assert [token.id for token in details.tokens] == asked.output_ids
        assert is_close([token.logprob for token in details.tokens], asked.logprobs)
        assert [token.id for token in details.prefill] == asked.ids
        assert is_close([token.logprob for token in details.prefill[1:]], asked.prompt_logprobs)


def text_streams(served: Served) -> None:
    client = connect(served)  # which closes its streams when it is collected
    for asked in served.completions[:4]:
        parts = list(client.text_generation(**greedy(asked), stream=True, details=True))
        assert [part.index for part in parts] == [*range(1, len(asked.output_ids) + 1)]
        assert [part.token.id for part in parts] == asked.output_ids
        assert "".join(part.token.text for part in parts if not part.token.special) == asked.text
        assert parts[-1].generated_text == asked.text
        assert parts[-1].details.input_length == len(asked.ids)
        assert parts[-1].details.finish_reason == TGI_REASONS[asked.finish_reason]
    asked = next(asked for asked in served.completions if asked.finish_reason == "length")
    assert "".join(client.text_generation(**greedy(asked), stream=True)) == asked.text


def text_streams_async(served: Served) -> None:
    async def ask() -> None:
        client = AsyncInferenceClient(served.root, token=served.api_key, timeout=60)
        for asked in served.completions[:3]:
            parts = await client.text_generation(**greedy(asked), stream=True, details=True)
            assert [part.token.id async for part in parts] == asked.output_ids
            assert await client.text_generation(**greedy(asked)) == asked.text

    asyncio.run(ask())


def text_has_a_grammar(served: Served) -> None:
    for kind, value in (("json", SCHEMA), ("regex", PATTERN)):
        text = connect(served).text_generation(
            "a girl", grammar={"type": kind, "value": value}, max_new_tokens=200, return_full_text=False
        )
        if kind == "json":
            assert set(json.loads(text)) == {"legs", "name"}
        else:
            assert re.fullmatch(PATTERN, text), text


def text_of_several_lines_streams(served: Served) -> None:
    """The client splits at every line end that Python knows."""
    lines = "one\x85two\u2028three\u2029four"
    client, grammar = connect(served), {"type": "regex", "value": lines}
    parts = client.text_generation(
        "a girl", grammar=grammar, max_new_tokens=200, stream=True, details=True, return_full_text=False
    )
    *_, last = parts
    assert last.generated_text == lines


def a_stop_text_ends_the_text(served: Served) -> None:
    asked = next(asked for asked in served.completions if len(asked.text) > 12)
    stop = asked.text[4:6]
    answer = connect(served).text_generation(**greedy(asked), stop=[stop], details=True)
    assert answer.generated_text.endswith(stop)
    assert answer.generated_text == asked.text[: asked.text.index(stop) + len(stop)]
    assert answer.details.finish_reason == "stop_sequence"


def an_adapter_changes_the_text(served: Served) -> None:
    asked = served.completions[0]
    assert connect(served).text_generation(**greedy(asked), adapter_id="tuned") != asked.text


def tgi_errors_are_raised(served: Served) -> None:
    for fields, wanted in (
        ({"top_p": 1.5, "do_sample": True}, "`top_p` must be > 0.0 and < 1.0"),
        ({"temperature": 0.0}, "`temperature` must be strictly positive"),
        ({"best_of": 2, "seed": 1, "do_sample": True}, "`seed` must not be set when `best_of` > 1"),
    ):
        text = ""
        try:
            connect(served).text_generation("a girl", max_new_tokens=3, **fields)  # type: ignore[call-overload]
        except ValidationError as error:
            text = str(error)
        assert wanted in text, (fields, text)


def a_wrong_key_is_refused(served: Served) -> None:
    status = 0
    try:
        InferenceClient(served.root, token="another", timeout=60).text_generation("a girl")
    except huggingface_hub.errors.HfHubHTTPError as error:
        status = error.response.status_code
    assert status == 401


CHECKS: list[Check] = [
    text_is_generated,
    text_has_details,
    text_streams,
    text_streams_async,
    text_has_a_grammar,
    text_of_several_lines_streams,
    a_stop_text_ends_the_text,
    an_adapter_changes_the_text,
    tgi_errors_are_raised,
    a_wrong_key_is_refused,
]
