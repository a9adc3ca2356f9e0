"""Tests `/v1/chat/completions` over a real socket, with the openai client and as plain HTTP."""

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.router.served_chats import HELLO, open_chats, post
from tests.support.router.served_http import MODEL, ServedHttp


async def prompt_of(served: ServedHttp, **fields: Any) -> str:
    """Return the prompt that the engine received, as text."""
    served.handle.specs.clear()
    status, answer = await post(served, "/v1/chat/completions", {"max_tokens": 1} | fields)
    assert status == 200, answer
    text: str = served.tokenizer.fast.decode(
        list(served.handle.specs[0].input_ids), skip_special_tokens=False
    )
    return text


async def test_answers_and_streams_are_the_same(tmp_path: Path) -> None:
    async with open_chats(tmp_path) as (served, client):
        fields: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 9, "temperature": 0, "n": 2}
        whole = await client.chat.completions.create(**fields, logprobs=True, top_logprobs=3)
        assert [choice.message.role for choice in whole.choices] == ["assistant"] * 2
        assert {choice.finish_reason for choice in whole.choices} <= {"length", "stop"}
        assert whole.choices[0].message.refusal is None
        assert whole.usage is not None
        num_inputs = len(served.handle.specs[0].input_ids)
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert served.handle.specs[0].details.top_n == 3  # the fake shard returns none
        num_tokens = sum(len(choice.logprobs.content) for choice in whole.choices)  # type: ignore[union-attr, arg-type]
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (num_inputs, num_tokens)

        stream = await client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant"] * 2
        assert all(chunk.choices[0].delta.role is None for chunk in chunks[2:-1])
        for choice in whole.choices:
            own = [each.choices[0] for each in chunks[:-1] if each.choices[0].index == choice.index]
            assert "".join(each.delta.content or "" for each in own) == choice.message.content
            assert [each.finish_reason for each in own[:-1]] == [None] * (len(own) - 1)
            assert own[-1].finish_reason == choice.finish_reason
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == num_tokens
        assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_counts_in_every_chunk(tmp_path: Path) -> None:
    async with open_chats(tmp_path) as (_, client):
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_completion_tokens=5,
            max_tokens=2,
            stream=True,
            extra_body={"ignore_eos": True, "stream_options": {"continuous_usage_stats": True}},
        )
        counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
    assert counts[0] == 0
    assert counts[-1] == 5
    assert counts == sorted(counts)


async def test_prompts_equal_the_rendered_template(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bonn"}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    async with open_chats(tmp_path) as (served, _):
        assert await prompt_of(served, messages=HELLO) == "<user>hello<assistant>"
        assert await prompt_of(served, messages=HELLO, add_generation_prompt=False) == "<user>hello"
        messages: Any = [{"role": "developer", "content": parts}, *HELLO]
        assert await prompt_of(served, messages=messages) == "<system>a\nb<user>hello<assistant>"
        messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
        assert await prompt_of(served, messages=messages) == "<user>hello<assistant>[Bonn]<assistant>"
        messages = [*HELLO, {"role": "assistant", "content": "so"}]
        continued = await prompt_of(served, messages=messages, continue_final_message=True)
        assert continued == "<user>hello<assistant>so"
        for name in ("reasoning_content", "reasoning"):
            messages = [*HELLO, {"role": "assistant", "content": "so", name: "why"}]
            assert await prompt_of(served, messages=messages) == "<user>hello<assistant>whyso<assistant>"
        variables = {"mood": "!"}
        assert (await prompt_of(served, messages=HELLO, chat_template_kwargs=variables)).endswith(
            "<assistant>!"
        )


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages"),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": [*HELLO, {"content": "a"}]}, "messages[1].role"),
    ({"messages": HELLO, "continue_final_message": True}, "continue_final_message"),
    ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": HELLO, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"messages": HELLO, "min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    ({"messages": HELLO, "stop": ["x" * 300]}, "stop"),
    ({"messages": HELLO, "logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"messages": [{"role": "user", "content": "word " * 400}]}, "messages"),
]


async def test_refusals_name_the_field(tmp_path: Path) -> None:
    async with open_chats(tmp_path) as (served, _):
        for fields, param in REFUSALS:
            status, answer = await post(served, "/v1/chat/completions", fields)
            assert (status, answer["error"]["param"]) == (400, param), (fields, answer)
        assert answer["error"]["code"] == "context_length_exceeded"


async def test_an_unknown_model_does_not_exist(tmp_path: Path) -> None:
    async with open_chats(tmp_path) as (_, client):
        for ask in (
            client.chat.completions.create(model="nobody/x", messages=HELLO, max_tokens=2),
            client.models.retrieve("nobody/x"),
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                await ask
            assert caught.value.code == "model_not_found"
            assert isinstance(caught.value.body, dict)
            assert caught.value.body["message"] == "The model 'nobody/x' does not exist."
