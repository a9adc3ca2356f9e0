"""Chats with a model that answers in Harmony, through OpenAI's client: whole answers and streams."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.router.scripted_chats import WEATHER, ScriptedChats, scripted_chats
from tests.support.router.served_chats import HELLO
from tests.support.router.served_http import MODEL
from tgis.router.chat.formats import harmony
from tgis.router.chat.formats.registry import ChatFormats

FORMATS = ChatFormats(harmony.HARMONY, harmony.HARMONY_REASONING)
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant"
)
THOUGHT = "<|channel|>analysis<|message|>hm, so<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Yes. No."
BONN = '{"city": "Bonn"}'
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{BONN}"


@pytest.fixture
async def chats(tmp_path: Path) -> AsyncIterator[ScriptedChats]:
    async with scripted_chats(tmp_path, FORMATS, TEMPLATE, harmony.MARKS, are_special=True) as chats:
        yield chats


async def ask(chats: ScriptedChats, **options: Any) -> tuple[Any, ...]:
    """Return reasoning, content, calls, finish reason and reasoning tokens, which the stream must repeat."""
    chat = chats.client.chat.completions
    whole = await chat.create(model=MODEL, messages=HELLO, **options)
    choice, reasoning, content = whole.choices[0], "", ""
    calls: list[list[str]] = []
    async for chunk in await chat.create(model=MODEL, messages=HELLO, stream=True, **options):
        for streamed in chunk.choices:
            reasoning += getattr(streamed.delta, "reasoning_content", None) or ""
            content += streamed.delta.content or ""
            for call in streamed.delta.tool_calls or []:
                if call.function.name:
                    calls.append([call.function.name, ""])
                calls[-1][1] += call.function.arguments
            reason = streamed.finish_reason
    message = choice.message
    expected = [[call.function.name, call.function.arguments] for call in message.tool_calls or []]
    assert (reasoning or None, content or None, calls) == (
        message.reasoning_content,
        message.content,
        expected,
    )
    assert reason == choice.finish_reason
    num_reasoning = whole.usage.completion_tokens_details.reasoning_tokens
    return reasoning, content, calls, reason, num_reasoning


async def test_content_after_reasoning(chats: ScriptedChats) -> None:
    ids = chats.script(THOUGHT + FINAL)
    end = chats.served.tokenizer.fast.token_to_id(harmony.END)
    assert await ask(chats) == ("hm, so", "Yes. No.", [], "stop", ids.index(end) + 1)


async def test_a_call(chats: ScriptedChats) -> None:
    chats.script(THOUGHT + CALL)
    *answer, _ = await ask(chats, tools=[WEATHER])
    assert answer == ["hm, so", "", [["weather", BONN]], "tool_calls"]
    assert chats.takes(THOUGHT + CALL)
    assert not chats.takes(THOUGHT + CALL.replace("city", "town"))


async def test_stop_sequences_end_content(chats: ScriptedChats) -> None:
    """They do not end reasoning, and headers hide nothing of them."""
    chats.script(f"{THOUGHT.replace('hm', '. No')}{FINAL}")
    *answer, _ = await ask(chats, stop=[". No"])
    assert answer == [". No, so", "Yes", [], "stop"]


async def test_answers_without_reasoning(chats: ScriptedChats) -> None:
    chats.script(FINAL)
    assert await ask(chats) == ("", "Yes. No.", [], "stop", 0)


THINKING = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>"
    "{{ message.thinking }}{{ message.content }}<|end|>{% endfor %}<|start|>assistant{# <|channel|> #}"
)


async def test_reasoning_of_a_history_is_left_out_beside_content_and_calls(tmp_path: Path) -> None:
    """Templates of gpt-oss refuse both together."""
    calls = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": BONN}}]
    async with scripted_chats(tmp_path, FORMATS, THINKING, harmony.MARKS, are_special=True) as chats:
        chats.script(FINAL)
        for content, tool_calls, shown in (("", calls, "hm"), ("so", [], "hmso"), ("so", calls, "so")):
            message = {"role": "assistant", "content": content, "tool_calls": tool_calls}
            messages = [*HELLO, message | {"reasoning_content": "hm"}]
            await chats.client.chat.completions.create(model=MODEL, messages=messages)
            assert f"<|start|>assistant<|message|>{shown}<|end|>" in chats.prompt()
