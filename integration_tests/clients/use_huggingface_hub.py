"""`huggingface_hub.InferenceClient` with the service's address as its model."""

import asyncio
import json
from typing import Any

import huggingface_hub
from huggingface_hub import AsyncInferenceClient, InferenceClient

from integration_tests.clients import hub_text_generation
from integration_tests.clients.expectations import Check, Served, run

SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "dog"]}, "is_quick": {"type": "boolean"}},
    "required": ["animal", "is_quick"],
    "additionalProperties": False,
}


LINES = "one\x85two\u2028three\u2029four"


def connect(served: Served) -> InferenceClient:
    return InferenceClient(base_url=served.base_url, api_key=served.api_key, timeout=60)


def a_chat_is_completed(served: Served) -> None:
    for chat in served.chats[:4]:
        answer = connect(served).chat_completion(
            chat.messages, model=served.model, max_tokens=chat.answer.max_tokens, temperature=0
        )
        assert answer.choices[0].message.content == chat.answer.text
        assert answer.choices[0].finish_reason == chat.answer.finish_reason
        assert answer.usage.completion_tokens == len(chat.answer.output_ids)


def a_chat_streams(served: Served) -> None:
    client = connect(served)  # which closes its streams when it is collected
    for chat in served.chats[:4]:
        parts = client.chat_completion(
            chat.messages, model=served.model, max_tokens=chat.answer.max_tokens, temperature=0, stream=True
        )
        assert (
            "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == chat.answer.text
        )


def a_chat_needs_no_model(served: Served) -> None:
    """The client then sends an unknown model name."""
    client, chat = connect(served), served.chats[0]
    fields: Any = {"max_tokens": chat.answer.max_tokens, "temperature": 0}
    answer = client.chat_completion(chat.messages, **fields)
    assert answer.choices[0].message.content == chat.answer.text
    assert answer.model == served.model
    parts = client.chat_completion(chat.messages, **fields, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == chat.answer.text


def a_chat_of_several_lines_streams(served: Served) -> None:
    """The client splits at every line end that Python knows."""
    client, regex = connect(served), {"structured_outputs": {"regex": LINES}}
    fields: Any = {"messages": served.chats[0].messages, "stream": True, "extra_body": regex}
    parts = client.chat_completion(**fields)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == LINES

    async def ask() -> str:
        client = AsyncInferenceClient(base_url=served.base_url, api_key=served.api_key, timeout=60)
        parts = await client.chat_completion(**fields)
        return "".join([part.choices[0].delta.content or "" async for part in parts if part.choices])

    assert asyncio.run(ask()) == LINES


def a_chat_streams_async(served: Served) -> None:
    async def ask() -> None:
        client = AsyncInferenceClient(base_url=served.base_url, api_key=served.api_key, timeout=60)
        for chat in served.chats[:3]:
            text = ""
            async for part in await client.chat_completion(
                chat.messages,
                model=served.model,
                max_tokens=chat.answer.max_tokens,
                temperature=0,
                stream=True,
            ):
                text += part.choices[0].delta.content or ""
            assert text == chat.answer.text

    asyncio.run(ask())


def logprobs_are_given(served: Served) -> None:
    chat = served.chats[0]
    answer = connect(served).chat_completion(
        chat.messages, model=served.model, max_tokens=3, temperature=0, logprobs=True, top_logprobs=4
    )
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == 3
    assert all(
        abs(one.logprob - other) < 1e-3 for one, other in zip(tokens, chat.answer.logprobs, strict=False)
    )
    assert all(len(token.top_logprobs) == 4 for token in tokens)


def answers_have_a_schema(served: Served) -> None:
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA}}
    answer = connect(served).chat_completion(
        served.chats[0].messages, model=served.model, response_format=response_format, max_tokens=200, seed=4
    )
    assert answer.choices[0].finish_reason == "stop", answer
    verdict = json.loads(answer.choices[0].message.content)
    assert set(verdict) == {"animal", "is_quick"}


def errors_have_their_text(served: Served) -> None:
    try:
        connect(served).chat_completion(served.chats[0].messages, model=served.model, temperature=9)
    except huggingface_hub.errors.BadRequestError as error:
        text = str(error)
    assert "temperature" in text


CHECKS: list[Check] = [
    a_chat_is_completed,
    a_chat_streams,
    a_chat_streams_async,
    a_chat_needs_no_model,
    a_chat_of_several_lines_streams,
    logprobs_are_given,
    answers_have_a_schema,
    errors_have_their_text,
    *hub_text_generation.CHECKS,
]

if __name__ == "__main__":
    run(CHECKS)
