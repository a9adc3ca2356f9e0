"""The `openai` package: completions, chats, streams, parsed responses and errors, sync and async."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import openai
import pydantic

from integration_tests.clients.expectations import Check, Completion, Served, is_close, run
from integration_tests.clients.openai_tools import LONG_CHECKS, TOOL_CHECKS, connect

Create = Callable[..., Any]


class Verdict(pydantic.BaseModel):
    animal: Literal["fox", "dog"]
    is_quick: bool
    num_legs: Literal[2, 3, 4]


def greedy(answer: Completion) -> dict[str, Any]:
    return {"prompt": answer.prompt, "max_tokens": answer.max_tokens, "temperature": 0}


def the_model_is_listed(served: Served) -> None:
    with connect(served) as client:
        names = [model.id for model in client.models.list()]
        assert served.model in names, names
        assert client.models.retrieve(served.model).id == served.model


def a_completion_is_transformers_own(served: Served) -> None:
    with connect(served) as client:
        for wanted in served.completions[:6]:
            answer = client.completions.create(model=served.model, **greedy(wanted))
            [choice] = answer.choices
            assert (choice.text, choice.finish_reason) == (wanted.text, wanted.finish_reason)
            assert answer.object == "text_completion"
            assert answer.model == served.model
            check_usage(answer.usage, wanted)


def check_usage(usage: Any, wanted: Completion) -> None:
    assert usage.prompt_tokens == len(wanted.ids)
    assert usage.completion_tokens == len(wanted.output_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def prompts_may_be_ids_and_many(served: Served) -> None:
    wanted = [answer for answer in served.completions if answer.finish_reason == "length"][:4]
    prompts: list[Any] = [
        wanted[0].ids,
        [answer.ids for answer in wanted],
        [answer.prompt for answer in wanted],
    ]
    limit = min(answer.max_tokens for answer in wanted)
    with connect(served) as client:
        for prompt in prompts:
            answer = client.completions.create(
                model=served.model, prompt=prompt, max_tokens=limit, temperature=0
            )
            num_prompts = 1 if prompt is prompts[0] else len(wanted)
            assert [choice.index for choice in answer.choices] == list(range(num_prompts))
            for choice, whole in zip(answer.choices, wanted, strict=False):
                assert whole.text.startswith(choice.text)
                assert choice.text


def a_stream_is_the_same_text(served: Served) -> None:
    with connect(served) as client:
        for wanted in served.completions[:6]:
            chunks = list(
                client.completions.create(
                    model=served.model, stream=True, stream_options={"include_usage": True}, **greedy(wanted)
                )
            )
            *parts, last = chunks
            assert "".join(part.choices[0].text for part in parts) == wanted.text
            assert [part.choices[0].finish_reason for part in parts if part.choices[0].finish_reason] == [
                wanted.finish_reason
            ]
            assert last.choices == []
            assert all(part.usage is None for part in parts)
            check_usage(last.usage, wanted)
            assert len({chunk.id for chunk in chunks}) == 1


def echo_scores_the_prompt(served: Served) -> None:
    wanted = served.completions[0]
    with connect(served) as client:
        answer = client.completions.create(
            model=served.model, prompt=wanted.ids, max_tokens=0, echo=True, logprobs=2, temperature=0
        )
    [choice] = answer.choices
    assert choice.logprobs is not None
    logprobs = choice.logprobs.token_logprobs
    assert logprobs is not None
    assert logprobs[0] is None
    assert is_close(logprobs[1:], wanted.prompt_logprobs), (logprobs, wanted.prompt_logprobs)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def the_end_of_sequence_has_a_score(served: Served) -> None:
    """lm-eval drops the last score, because it belongs to the one token that the model generates."""
    wanted = next(answer for answer in served.completions if answer.finish_reason == "stop")
    prompt = wanted.ids + wanted.output_ids[:-1]
    with connect(served) as client:
        answer = client.completions.create(
            model=served.model, prompt=prompt, max_tokens=1, echo=True, logprobs=1, temperature=0
        )
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    scores = choice.logprobs.token_logprobs or []
    assert is_close(scores[1:], wanted.prompt_logprobs + wanted.logprobs)


def completions_have_logprobs(served: Served) -> None:
    wanted = served.completions[0]
    with connect(served) as client:
        answer = client.completions.create(model=served.model, logprobs=3, **greedy(wanted))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    num = len(logprobs.token_logprobs)
    assert is_close(logprobs.token_logprobs, wanted.logprobs[:num])
    assert num >= len(wanted.output_ids) - 1  # some servers leave out the end-of-sequence token
    assert all(len(top) >= 3 for top in logprobs.top_logprobs)


def a_chat_is_transformers_own(served: Served) -> None:
    with connect(served) as client:
        for chat in served.chats[:5]:
            wanted = chat.answer
            answer = client.chat.completions.create(
                model=served.model,
                messages=chat.messages,  # type: ignore[arg-type]
                max_completion_tokens=wanted.max_tokens,
                temperature=0,
            )
            [choice] = answer.choices
            assert (choice.message.role, choice.message.content) == ("assistant", wanted.text)
            assert choice.finish_reason == wanted.finish_reason
            assert answer.object == "chat.completion"
            check_usage(answer.usage, wanted)


def a_chat_streams_the_same_text(served: Served) -> None:
    with connect(served) as client:
        for chat in served.chats[:5]:
            request: dict[str, Any] = {
                "model": served.model,
                "messages": chat.messages,
                "max_tokens": chat.answer.max_tokens,
                "temperature": 0,
                "stream_options": {"include_usage": True},
            }
            *parts, last = client.chat.completions.create(stream=True, **request)
            assert parts[0].choices[0].delta.role == "assistant"
            assert "".join(part.choices[0].delta.content or "" for part in parts) == chat.answer.text
            reasons = [part.choices[0].finish_reason for part in parts if part.choices[0].finish_reason]
            assert reasons == [chat.answer.finish_reason]
            check_usage(last.usage, chat.answer)
            if chat.answer.finish_reason == "stop":  # otherwise the garbage collector raises an error
                with client.chat.completions.stream(**request) as stream:
                    deltas = "".join(event.delta for event in stream if event.type == "content.delta")
                assert deltas == chat.answer.text


def chats_have_logprobs(served: Served) -> None:
    chat = served.chats[0]
    with connect(served) as client:
        answer = client.chat.completions.create(
            model=served.model,
            messages=chat.messages,  # type: ignore[arg-type]
            max_tokens=chat.answer.max_tokens,
            temperature=0,
            logprobs=True,
            top_logprobs=20,
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    given = [token.logprob for token in logprobs.content]
    assert is_close(given, chat.answer.logprobs[: len(given)])
    assert all(len(token.top_logprobs) == 20 for token in logprobs.content)
    assert all(token.top_logprobs[0].logprob == token.logprob for token in logprobs.content)
    text = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert text.decode().removesuffix("</s>") == chat.answer.text


def several_answers_are_seeded(served: Served) -> None:
    def ask(seed: int) -> list[str]:
        answer = client.chat.completions.create(
            model=served.model,
            messages=served.chats[0].messages,  # type: ignore[arg-type]
            n=3,
            seed=seed,
            max_tokens=20,
            temperature=1.2,
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content or "" for choice in answer.choices]

    with connect(served) as client:
        first = ask(5)
        assert len(set(first)) == 3
        assert ask(5) == first
        assert ask(6) != first


def stop_strings_end_texts(served: Served) -> None:
    wanted = max(served.completions, key=lambda answer: len(answer.text))
    stop = wanted.text[len(wanted.text) // 2 :][:3]
    with connect(served) as client:
        answer = client.completions.create(model=served.model, stop=[stop, "never there"], **greedy(wanted))
    assert answer.choices[0].text == wanted.text[: wanted.text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def answers_are_parsed(served: Served) -> None:
    with connect(served) as client:
        for i, chat in enumerate(served.chats[:4]):
            answer = client.chat.completions.parse(
                model=served.model,
                messages=chat.messages,  # type: ignore[arg-type]
                response_format=Verdict,
                temperature=1,
                seed=i,
            )
            assert isinstance(answer.choices[0].message.parsed, Verdict)
            assert answer.choices[0].finish_reason == "stop"


def names_of_adapters_are_models(served: Served) -> None:
    wanted = served.completions[0]
    with connect(served) as client:
        answer = client.completions.create(model="tuned", **greedy(wanted))
        assert answer.model == "tuned"
        assert answer.choices[0].text != wanted.text


def errors_are_the_package_s_own(served: Served) -> None:
    long = [5] * (served.max_sequence_length + 1)
    with connect(served) as client:
        _refused(client.completions.create, openai.NotFoundError, "model_not_found", model="none", prompt="a")
        create = client.completions.create
        _refused(create, openai.BadRequestError, "context_length_exceeded", model=served.model, prompt=long)
        _refused(create, openai.BadRequestError, model=served.model, prompt="a", temperature=9)
        _refused(create, openai.BadRequestError, model=served.model, prompt="a", suffix="b")
        _refused(create, openai.BadRequestError, model=served.model, prompt="a", max_tokens=-1, stream=True)
        _refused(client.embeddings.create, openai.APIStatusError, model=served.model, input="a")
        chats = client.chat.completions.create
        _refused(chats, openai.BadRequestError, model=served.model, messages=[])
    with connect(served, api_key="another") as client:
        _refused(client.completions.create, openai.AuthenticationError, model=served.model, prompt="a")


def _refused(create: Create, kind: type[openai.APIStatusError], code: str = "", **request: Any) -> None:
    try:
        create(**request)
    except kind as error:
        refusal = error
    else:
        raise AssertionError(f"not refused: {request}")
    assert refusal.status_code < 500, refusal
    assert refusal.type, refusal.body
    assert not code or refusal.code == code, refusal.body
    assert refusal.body["message"], refusal.body  # type: ignore[index]


def concurrent_calls_get_the_same_answer(served: Served) -> None:
    asyncio.run(_crowd(served))


async def _crowd(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key=served.api_key) as client:

        async def complete(wanted: Completion) -> None:
            answer = await client.completions.create(model=served.model, **greedy(wanted))
            assert answer.choices[0].text == wanted.text

        async def stream(wanted: Completion) -> None:
            text = ""
            async for chunk in await client.completions.create(
                model=served.model, stream=True, **greedy(wanted)
            ):
                text += chunk.choices[0].text
            assert text == wanted.text

        asks = [ask(answer) for answer in served.completions[:12] for ask in (complete, stream)]
        await asyncio.gather(*asks)


CHECKS: list[Check] = [
    the_model_is_listed,
    a_completion_is_transformers_own,
    prompts_may_be_ids_and_many,
    a_stream_is_the_same_text,
    echo_scores_the_prompt,
    the_end_of_sequence_has_a_score,
    completions_have_logprobs,
    a_chat_is_transformers_own,
    a_chat_streams_the_same_text,
    chats_have_logprobs,
    several_answers_are_seeded,
    stop_strings_end_texts,
    answers_are_parsed,
    names_of_adapters_are_models,
    errors_are_the_package_s_own,
    concurrent_calls_get_the_same_answer,
    *TOOL_CHECKS,
]

if __name__ == "__main__":
    run([*CHECKS, *LONG_CHECKS])
