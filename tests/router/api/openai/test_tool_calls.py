"""Tests tool calls in chats over a real socket, with the openai client."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.chats import Reference, template_text
from tests.support.router.scripted_chats import CLOCK, TEMPLATE, WEATHER, ScriptedChats, scripted_chats
from tests.support.router.served_chats import HELLO, post
from tests.support.router.served_http import MODEL
from tgis.router.chat.formats.hermes import HERMES
from tgis.router.chat.formats.registry import ChatFormats
from tgis.router.chat.renderer import Chat

HERMES_CHATS = ChatFormats(tools=HERMES)
BONN, UTC = '{"city": "Bonn"}', '{"zone":   "UTC"}'
TWO_CALLS = (
    f'<tool_call>\n{{"name": "weather", "arguments": {BONN}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "clock", "arguments": {UTC}}}\n</tool_call>'
)


async def stream(chats: ScriptedChats, **fields: Any) -> tuple[dict[str, Any], str, list[Any]]:
    """Return the message joined from the deltas, the finish reason and the chunks."""
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

            shard = chats.served.scene.shard
            shard.step_s = 0.005  # a reader that is briefly late still gets many chunks
            message, reason, chunks = await stream(chats, **fields)
            shard.step_s = 0.001
            assert (message["content"], reason) == (before.strip(), "tool_calls")
            assert [tuple(call[1:]) for call in message["calls"]] == [("weather", BONN), ("clock", UTC)]
            assert len(chunks) > 6, "arguments come as they are written"
        for text in (
            "almost <tool_call>\n{",
            '<tool_call>\n{"name": "whether", "arguments": {}}\n</tool_call>',
        ):
            chats.script(text)
            message, reason, _ = await stream(chats, **fields)
            assert (message, reason) == ({"content": text, "calls": []}, "stop")


async def test_choices(tmp_path: Path) -> None:
    """Each choice determines the form of an answer, and which answers its grammar accepts."""
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
            assert chats.served.handle.specs[-1].grammar is None


BROKEN = {"function": {"name": "f", "parameters": {"$ref": "x"}, "strict": True}}
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "n" * 65}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools"),
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools"),
    ({"tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools"),
    ({"tools": [{"function": {"name": "f", "description": 5}}]}, "tools"),
    ({"tools": [{"function": {"name": "f", "strict": "yes"}}]}, "tools"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [{"function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
    ({"tools": "weather"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": "some"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"functions": [WEATHER["function"]]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"tools": [BROKEN]}, "tools[0].function.parameters"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
]


async def test_refusals_name_the_field(tmp_path: Path) -> None:
    async with scripted_chats(tmp_path / "hermes", HERMES_CHATS) as chats:
        for fields, param in REFUSALS:
            status, answer = await post(chats.served, "/v1/chat/completions", {"messages": HELLO} | fields)
            assert (status, answer["error"]["param"]) == (400, param), (fields, answer)
    for formats, template in OBLIVIOUS.values():
        async with scripted_chats(tmp_path / "oblivious", formats, template) as chats:
            body = {"messages": HELLO, "tools": [WEATHER]}
            for fields in ({}, {"tool_choice": "auto"}):
                status, answer = await post(chats.served, "/v1/chat/completions", body | fields)
                assert (status, answer["error"]["param"]) == (400, "tools")
                assert "--tool-call-parser" in answer["error"]["message"]
                assert "--chat-template" in answer["error"]["message"]


BLIND = "{{ messages[0].content }}{% if add_generation_prompt %}:{% endif %}"
OBLIVIOUS = {
    "no known form": (ChatFormats(), TEMPLATE),
    "tools are not shown": (HERMES_CHATS, BLIND),
    "neither": (ChatFormats(), BLIND),
}


@pytest.mark.parametrize("case", OBLIVIOUS)
async def test_any_model_can_be_made_to_call(case: str, tmp_path: Path) -> None:
    """The grammar alone makes calls, whatever the template shows. For an unknown format, calls are a list."""
    formats, template = OBLIVIOUS[case]
    one = f'[{{"name": "weather", "parameters": {BONN}}}]'
    two = f'[{{"name": "weather", "parameters": {BONN}}}, {{"name": "clock", "parameters": {UTC}}}]'
    if formats.tools is HERMES:
        one, two = TWO_CALLS.split("\n<tool_call>")[0], TWO_CALLS
    named = {"type": "function", "function": {"name": "weather"}}
    async with scripted_chats(tmp_path, formats, template) as chats:
        for choice, script, names, finish in (
            ("required", two, ["weather", "clock"], "tool_calls"),
            ("required", one, ["weather"], "tool_calls"),
            (named, one, ["weather"], "stop"),
        ):
            chats.script(script)
            fields: Any = {"messages": HELLO, "tools": [WEATHER, CLOCK], "tool_choice": choice}
            answer = await chats.client.chat.completions.create(model=MODEL, **fields)
            [whole] = answer.choices
            calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
            assert calls == list(zip(names, (BONN, UTC), strict=False))
            assert (whole.finish_reason, whole.message.content) == (finish, None)
            assert chats.takes(script)
            assert chats.takes(one)
            assert chats.takes(two) == (choice == "required")
            assert not any(map(chats.takes, ("hello", "[]", one[:-1], one.replace('"Bonn"', "1"))))
            message, reason, _ = await stream(chats, **fields)
            assert [(name, arguments) for _, name, arguments in message["calls"]] == calls
            assert (message["content"], reason) == ("", finish)
        chats.script("hello")
        fields["tool_choice"] = "none"
        answer = await chats.client.chat.completions.create(model=MODEL, **fields)
        assert answer.choices[0].message.content == "hello"
        assert chats.served.handle.specs[-1].grammar is None


async def test_a_truncated_tool_call_is_returned_as_generated(tmp_path: Path) -> None:
    async with scripted_chats(tmp_path, HERMES_CHATS) as chats:
        fields: Any = {"messages": HELLO, "tools": [WEATHER, CLOCK]}
        fast, ids = chats.served.tokenizer.fast, chats.script(TWO_CALLS)
        fields["max_tokens"] = next(num for num in range(len(ids)) if "Bon" in fast.decode(ids[:num]))
        written = fast.decode(ids[: fields["max_tokens"]]).split('"arguments": ')[1]
        assert BONN.startswith(written)
        assert written != BONN
        answer = await chats.client.chat.completions.create(model=MODEL, **fields)
        [choice] = answer.choices
        assert choice.finish_reason == "length"
        assert [call.function.arguments for call in choice.message.tool_calls or ()] == [written]
        message, reason, _ = await stream(chats, **fields)
        assert (message["calls"][0][2], reason) == (written, "length")


async def test_prompts_and_counts_are_those_of_transformers(tmp_path: Path) -> None:
    """The history covers a whole tool loop. A function's keys have the order that transformers' users
    write."""
    messages: Any = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call_of("1", "weather", BONN)]},
        {"role": "tool", "content": "dry", "tool_call_id": "1"},
    ]
    swapped = {"function": dict(reversed(WEATHER["function"].items())) | {"strict": True}, "type": "function"}
    async with scripted_chats(tmp_path, HERMES_CHATS, template_text("chatml_tools")) as chats:
        chats.script("fine")
        shown = [dict(message) for message in messages]
        shown[1] = shown[1] | {"content": "", "tool_calls": [call_of("1", "weather", json.loads(BONN))]}
        prompt = Reference(template_text("chatml_tools")).render(Chat(shown, [WEATHER]))
        for tool in (WEATHER, swapped):
            body = {"messages": messages, "tools": [tool]}
            status, answer = await post(chats.served, "/v1/chat/completions", body)
            assert status == 200, answer
            assert chats.prompt() == prompt
            _, counted = await post(chats.served, "/tokenize", body)
            assert counted["count"] == answer["usage"]["prompt_tokens"]


def call_of(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


async def test_templates_may_read_how_much_to_reason(tmp_path: Path) -> None:
    template = "{{ messages[0].content }} {{ reasoning_effort }}"
    async with scripted_chats(tmp_path, ChatFormats(), template) as chats:
        chats.script("fine")
        for fields in ({}, {"chat_template_kwargs": {"reasoning_effort": "low"}}):
            body = {"messages": HELLO, "reasoning_effort": "high"} | fields
            status, _ = await post(chats.served, "/v1/chat/completions", body)
            assert status == 200
            assert chats.prompt() == f"hello {'low' if fields else 'high'}"
