"""The `litellm` package, with the service as an `openai` provider at its own address."""

import asyncio
import os
from typing import Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise the import downloads prices

import litellm
import pydantic

from integration_tests.clients.expectations import Check, Served, run

litellm.telemetry = False
litellm.suppress_debug_info = True


class Verdict(pydantic.BaseModel):
    animal: Literal["fox", "dog"]
    is_quick: bool


def of(served: Served, provider: str = "openai", **more: Any) -> dict[str, Any]:
    return {
        "model": f"{provider}/{served.model}",
        "api_base": served.base_url,
        "api_key": served.api_key,
        "temperature": 0,
        "num_retries": 0,
        **more,
    }


def a_chat_is_completed(served: Served) -> None:
    for provider in ("openai", "hosted_vllm"):
        for chat in served.chats[:3]:
            request = of(served, provider, messages=chat.messages, max_tokens=chat.answer.max_tokens)
            answer = litellm.completion(**request)
            assert answer.choices[0].message.content == chat.answer.text
            assert answer.choices[0].finish_reason == chat.answer.finish_reason
            assert answer.usage.prompt_tokens == len(chat.answer.ids)
            assert answer.usage.completion_tokens == len(chat.answer.output_ids)


def a_chat_streams(served: Served) -> None:
    for chat in served.chats[:4]:
        request = of(served, messages=chat.messages, max_tokens=chat.answer.max_tokens, stream=True)
        parts = list(litellm.completion(**request))
        assert "".join(part.choices[0].delta.content or "" for part in parts) == chat.answer.text


def a_chat_streams_async(served: Served) -> None:
    async def ask() -> None:
        for chat in served.chats[:3]:
            request = of(served, messages=chat.messages, max_tokens=chat.answer.max_tokens, stream=True)
            parts = [part async for part in await litellm.acompletion(**request)]
            assert "".join(part.choices[0].delta.content or "" for part in parts) == chat.answer.text

    asyncio.run(ask())


def a_text_is_completed(served: Served) -> None:
    for wanted in served.completions[:4]:
        request = of(served, "text-completion-openai", prompt=wanted.prompt, max_tokens=wanted.max_tokens)
        assert litellm.text_completion(**request).choices[0].text == wanted.text


def answers_have_a_schema(served: Served) -> None:
    request = of(served, messages=served.chats[0].messages, response_format=Verdict, seed=2)
    answer = litellm.completion(**{**request, "temperature": 1})
    Verdict.model_validate_json(answer.choices[0].message.content)


def errors_are_the_package_s_own(served: Served) -> None:
    messages = served.chats[0].messages
    long = [{"role": "user", "content": "fox " * served.max_sequence_length}]
    for kind, request in (
        (litellm.NotFoundError, {"model": "openai/none", "messages": messages}),
        (litellm.AuthenticationError, {"api_key": "another", "messages": messages}),
        (litellm.BadRequestError, {"temperature": 9, "messages": messages}),
        (litellm.ContextWindowExceededError, {"messages": long}),
    ):
        try:
            litellm.completion(**{**of(served), **request})
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")


CHECKS: list[Check] = [
    a_chat_is_completed,
    a_chat_streams,
    a_chat_streams_async,
    a_text_is_completed,
    answers_have_a_schema,
    errors_are_the_package_s_own,
]

if __name__ == "__main__":
    run(CHECKS)
