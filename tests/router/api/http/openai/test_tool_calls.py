"""Calls of tools in chats, over a real socket and with the openai client."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.router.chat_door import HELLO
from tests.support.router.http_door import MODEL
from tests.support.router.scripted_chats import CLOCK, WEATHER, ScriptedChats, scripted_chats
from tgis.router.chat.formats.hermes import HERMES
from tgis.router.chat.formats.registry import ChatFormats

HERMES_CHATS = ChatFormats(tools=HERMES)
BONN, UTC = '{"city": "Bonn"}', '{"zone":   "UTC"}'
TWO_CALLS = (
    f'<tool_call>\n{{"name": "weather", "arguments": {BONN}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "clock", "arguments": {UTC}}}\n</tool_call>'
)


async def stream(chats: ScriptedChats, **fields: Any) -> tuple[dict[str, Any], str, list[Any]]:
    """Return the message that the deltas make, the finish reason and the chunks, by plain addition."""
    message: dict[str, Any] = {"content": "", "calls": []}
    reason, chunks = "", []
    async for chunk in await chats.client.chat.completions.create(model=MODEL, stream=True, **fields):
        chunks.append(chunk)
        for choice in chunk.choices:
            assert not reason, "nothing follows the finish"
            reason = choice.finish_reason or ""
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    assert call.index == len(message["calls"])
                    assert (call.type, call.function.arguments) == ("function", "")
                    message["calls"].append([call.id, call.function.name, ""])
                else:
                    assert call.index == len(message["calls"]) - 1
                    assert call.function.name is None
                    message["calls"][-1][2] += call.function.arguments
    return message, reason, chunks


@pytest.mark.parametrize("are_marks", [False, True])
async def test_calls_are_read_from_the_text(are_marks: bool, tmp_path: Path) -> None:
    marks = ("<tool_call>", "</tool_call>") if are_marks else ()
    fields: Any = {"messages": HELLO, "tools": [WEATHER, CLOCK]}
    async with scripted_chats(tmp_path, HERMES_CHATS, marks=marks) as chats:
        for before in ("", "Let me see.\n\n"):
            ids = chats.script(before + TWO_CALLS)
            answer = await chats.client.chat.completions.create(model=MODEL, **fields)
            [choice] = answer.choices
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == (before.strip() or None)
            calls = choice.message.tool_calls or []
            assert [(call.function.name, call.function.arguments) for call in calls] == [
                ("weather", BONN),
                ("clock", UTC),
            ]
            assert all(call.id.startswith("chatcmpl-tool-") and call.type == "function" for call in calls)
            assert len({call.id for call in calls}) == 2
            assert answer.usage is not None
            assert answer.usage.completion_tokens == len(ids)
            assert answer.usage.completion_tokens_details is None

            message, reason, chunks = await stream(chats, **fields)
            assert (message["content"], reason) == (before.strip(), "tool_calls")
            assert [tuple(call[1:]) for call in message["calls"]] == [("weather", BONN), ("clock", UTC)]
            assert len(chunks) > 10, "arguments come as they are written"


async def test_choices(tmp_path: Path) -> None:
    """What each choice makes of one answer, and which answers its grammar takes."""
    one = TWO_CALLS.partition('\n<tool_call>\n{"name": "clock"')[0]
    clock = one.replace("weather", "clock").replace(BONN, UTC)
    named = {"type": "function", "function": {"name": "weather"}}
    allowed = {"type": "function", "function": {"name": "clock"}}
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [allowed]}}
    table: list[tuple[dict[str, Any], str, str, set[str]]] = [
        ({}, TWO_CALLS, "tool_calls", {"text", "one", "two", "text and two", "clock"}),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, one, "tool_calls", {"text", "one", "clock"}),
        ({"tool_choice": "required"}, TWO_CALLS, "tool_calls", {"one", "two", "clock"}),
        ({"tool_choice": "required", "parallel_tool_calls": False}, one, "tool_calls", {"one", "clock"}),
        ({"tool_choice": named}, one, "stop", {"one"}),
        ({"tool_choice": some}, clock, "tool_calls", {"clock"}),
    ]
    answers = {
        "text": "hello",
        "one": one,
        "two": TWO_CALLS,
        "text and two": "hi\n" + TWO_CALLS,
        "clock": clock,
    }
    answers |= {"bad": one.replace('"Bonn"', "5"), "unknown": one.replace("weather", "whether")}
    async with scripted_chats(tmp_path, HERMES_CHATS) as chats:
        for fields, text, reason, taken in table:
            chats.script(text)
            answer = await chats.client.chat.completions.create(
                model=MODEL, messages=HELLO, tools=[WEATHER, CLOCK], **fields
            )
            choice = answer.choices[0]
            assert choice.finish_reason == reason, fields
            assert len(choice.message.tool_calls or ()) == text.count("<tool_call>")
            assert {name for name, one in answers.items() if chats.takes(one)} == taken, fields


async def test_calls_are_text_where_none_are_wanted(tmp_path: Path) -> None:
    async with scripted_chats(tmp_path, HERMES_CHATS) as chats:
        chats.script(TWO_CALLS)
        for fields in ({"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}, {}):
            body: Any = {"model": MODEL, "messages": HELLO, **fields}
            answer = await chats.client.chat.completions.create(**body)
            [choice] = answer.choices
            assert (choice.message.content, choice.finish_reason) == (TWO_CALLS, "stop")
            assert choice.message.tool_calls is None
            assert chats.prompt().startswith("weather" if fields.get("tools") else "<user>")
            assert chats.door.handle.specs[-1].grammar is None
