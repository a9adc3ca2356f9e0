"""The Shepherd Model Gateway in front of two services, called by the `openai` package. Chats through it are
transformers' own."""

import asyncio
from typing import Any

import openai

from integration_tests.clients import use_openai
from integration_tests.clients.expectations import Check, Served, run
from integration_tests.clients.openai_tools import connect


def a_chat_ends_at_a_stop_string(served: Served) -> None:
    """The gateway finds stop strings itself, and aborts the request at the service."""
    chat = served.chats[0]
    stop, messages = chat.answer.text[4:6], chat.messages
    with connect(served) as client:
        answer = client.chat.completions.create(
            model=served.model,
            messages=messages,
            temperature=0,
            stop=[stop],
            max_tokens=chat.answer.max_tokens,
        )  # type: ignore[call-overload]
    assert answer.choices[0].message.content == chat.answer.text[: chat.answer.text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def a_response_has_the_text_of_the_chat(served: Served) -> None:
    with connect(served) as client:
        for chat in served.chats[:3]:
            messages: Any = chat.messages
            answer = client.responses.create(
                model=served.model, input=messages, max_output_tokens=chat.answer.max_tokens, temperature=0
            )
            assert answer.output_text == chat.answer.text


def a_crowd_is_answered_and_its_cancelled_half_is_not_missed(served: Served) -> None:
    asyncio.run(_crowd(served))


async def _crowd(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key="none", max_retries=0) as client:

        async def ask(number: int) -> None:
            chat = served.chats[number % len(served.chats)]
            stream: Any = await client.chat.completions.create(
                model=served.model,
                messages=chat.messages,
                temperature=0,
                max_tokens=chat.answer.max_tokens,
                stream=True,
            )  # type: ignore[call-overload]
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                if number % 2 and text:
                    await stream.close()
                    return
            assert text == chat.answer.text

        await asyncio.gather(*(ask(number) for number in range(32)))


CHECKS: list[Check] = [
    use_openai.the_model_is_listed,
    use_openai.a_chat_is_transformers_own,
    use_openai.a_chat_streams_the_same_text,
    use_openai.chats_have_logprobs,
    use_openai.several_answers_are_seeded,
    use_openai.answers_are_parsed,
    a_chat_ends_at_a_stop_string,
    a_response_has_the_text_of_the_chat,
    a_crowd_is_answered_and_its_cancelled_half_is_not_missed,
]

if __name__ == "__main__":
    run(CHECKS)
