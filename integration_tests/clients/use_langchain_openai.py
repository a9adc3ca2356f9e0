"""The `langchain-openai` package: a chat model that is invoked, streams and answers in a schema."""

import asyncio
from typing import Any, Literal

import pydantic
from langchain_openai import ChatOpenAI, OpenAI

from integration_tests.clients.expectations import Check, Served, run


class Verdict(pydantic.BaseModel):
    """Say what it is."""

    animal: Literal["fox", "dog"]
    is_quick: bool


def connect(served: Served, **more: Any) -> ChatOpenAI:
    settings = {
        "base_url": served.base_url,
        "api_key": served.api_key,
        "model": served.model,
        "max_retries": 0,
    }
    return ChatOpenAI(**{**settings, "temperature": 0, **more})


def a_chat_is_invoked(served: Served) -> None:
    for chat in served.chats[:4]:
        answer = connect(served, max_tokens=chat.answer.max_tokens).invoke(chat.messages)
        assert answer.content == chat.answer.text
        usage = answer.usage_metadata
        assert usage is not None
        assert usage["input_tokens"] == len(chat.answer.ids)
        assert usage["output_tokens"] == len(chat.answer.output_ids)
        assert answer.response_metadata["finish_reason"] == chat.answer.finish_reason


def a_chat_streams(served: Served) -> None:
    for chat in served.chats[:4]:
        model = connect(served, max_tokens=chat.answer.max_tokens, stream_usage=True)
        parts = list(model.stream(chat.messages))
        assert "".join(str(part.content) for part in parts) == chat.answer.text
        assert sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata) == len(
            chat.answer.output_ids
        )


def a_batch_is_async(served: Served) -> None:
    chats = [chat for chat in served.chats if chat.answer.max_tokens == served.chats[0].answer.max_tokens][:8]
    model = connect(served, max_tokens=chats[0].answer.max_tokens)
    answers = asyncio.run(model.abatch([chat.messages for chat in chats]))
    assert [answer.content for answer in answers] == [chat.answer.text for chat in chats]


def answers_have_a_schema(served: Served) -> None:
    model = connect(served, temperature=1, seed=3).with_structured_output(Verdict, method="json_schema")
    assert isinstance(model.invoke(served.chats[0].messages), Verdict)


def a_text_is_completed(served: Served) -> None:
    for wanted in served.completions[:4]:
        model = OpenAI(
            base_url=served.base_url,
            api_key=served.api_key,  # type: ignore[arg-type]
            model=served.model,
            temperature=0,
            max_tokens=wanted.max_tokens,
        )
        assert model.invoke(wanted.prompt) == wanted.text


CHECKS: list[Check] = [
    a_chat_is_invoked,
    a_chat_streams,
    a_batch_is_async,
    answers_have_a_schema,
    a_text_is_completed,
]

if __name__ == "__main__":
    run(CHECKS)
