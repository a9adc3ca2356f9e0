"""Tests reasoning in chats over a real socket, with the openai client."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.router.fake_shard import EOS
from tests.support.router.scripted_chats import WEATHER, ScriptedChats, scripted_chats
from tests.support.router.served_chats import HELLO, post
from tests.support.router.served_http import MODEL
from tgis.router.chat.formats.hermes import HERMES
from tgis.router.chat.formats.registry import ChatFormats
from tgis.router.chat.formats.think import THINK

THINKING = ChatFormats(reasoning=THINK)
MARKS = ("<think>", "</think>")


async def ask(chats: ScriptedChats, **fields: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return message, usage and finish reason of an answer. A streamed answer must have the same ones."""
    body = {"messages": HELLO} | fields
    status, whole = await post(chats.served, "/v1/chat/completions", body)
    assert status == 200, whole
    [choice] = whole["choices"]
    message: dict[str, Any] = {}
    reason, usage = None, None
    async for chunk in await chats.client.chat.completions.create(
        model=MODEL,
        stream=True,
        messages=body.pop("messages"),
        extra_body=body | {"stream_options": {"include_usage": True}},
    ):
        usage = chunk.usage
        for one in chunk.choices:
            reason = one.finish_reason
            for name, value in one.delta.model_dump(exclude_unset=True).items():
                message[name] = message.get(name, "") + value
    assert usage is not None
    for name in ("completion_tokens", "completion_tokens_details"):
        assert usage.model_dump(exclude_unset=True)[name] == whole["usage"][name]
    assert reason == choice["finish_reason"]
    present = {name: value for name, value in choice["message"].items() if value is not None}
    assert message == present
    return choice["message"], whole["usage"], choice["finish_reason"]


@pytest.mark.parametrize("marks", ["special", "added", "texts"])
async def test_reasoning_is_separate(marks: str, tmp_path: Path) -> None:
    tokens = MARKS if marks != "texts" else ()
    async with scripted_chats(tmp_path, THINKING, marks=tokens, are_special=marks == "special") as chats:
        for text, opening, thought, content in (
            ("<think>\nto be</think>\n\nnot to be", "", "\nto be", "not to be"),
            ("to be</think>or not", "<think>\n", "to be", "or not"),
            ("just so", "<think>\n\n</think>\n\n", None, "just so"),
            ("just so", "", None, "just so"),
            ("to be", "<think>", "to be", ""),
            (" <think>to be", "", "to be", ""),
        ):
            ids = chats.script(text)
            variables = {"opening": opening}
            message, usage, reason = await ask(chats, chat_template_kwargs=variables)
            assert reason == "stop"
            assert (message["reasoning_content"], message["content"]) == (thought, content)
            num = usage["completion_tokens_details"]["reasoning_tokens"]
            spelled = text.partition("</think>")
            reasoned = chats.served.tokenizer.fast.encode(
                spelled[0] + spelled[1], add_special_tokens=False
            ).ids
            expected = 0 if thought is None else len(reasoned) if spelled[1] else len(ids)
            # A mark without a token of its own is only recognized with the next token.
            assert expected <= num <= expected + (marks == "texts"), text
            hidden, _, _ = await ask(chats, chat_template_kwargs=variables, include_reasoning=False)
            assert hidden == {"role": "assistant", "content": content, "refusal": None}


async def test_chunks_count_the_tokens_of_their_choice(tmp_path: Path) -> None:
    async with scripted_chats(tmp_path, THINKING, marks=MARKS) as chats:
        num_reasoned = len(chats.script("<think>hm</think>", ends=False))
        num_tokens = len(chats.script("<think>hm</think>red"))
        counts: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
        async for chunk in await chats.client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            n=2,
            stream=True,
            extra_body={"stream_options": {"continuous_usage_stats": True}},
        ):
            assert chunk.usage is not None
            assert chunk.usage.completion_tokens_details is not None
            num_reasoning = chunk.usage.completion_tokens_details.reasoning_tokens or 0
            counts[chunk.choices[0].index].append((chunk.usage.completion_tokens, num_reasoning))
        for totals in counts.values():
            assert totals == sorted(totals)
            assert totals[0] == (0, 0)
            assert totals[-1] == (num_tokens, num_reasoned)


async def test_constraints_begin_after_the_reasoning(tmp_path: Path) -> None:
    colour: Any = {"structured_outputs": {"choice": ["red", "blue"]}}
    async with scripted_chats(tmp_path, THINKING, marks=MARKS) as chats:
        chats.script("<think>hm</think>red")
        for fields, opening, taken in (
            (colour, "", {"red", "<think>hm</think>red"}),
            (colour, "<think>", {"hm</think>red"}),
            (colour, "<think>\n\n</think>\n\n", {"red"}),
            ({"max_reasoning_tokens": 3}, "", {"red", "green", "<think>hm</think>red"}),
            ({"max_reasoning_tokens": 3}, "<think>", {"hm</think>red", "hm</think>green"}),
            ({"max_reasoning_tokens": 3, **colour}, "<think>", {"hm</think>red"}),
        ):
            fields = {"chat_template_kwargs": {"opening": opening}} | fields
            status, answer = await post(chats.served, "/v1/chat/completions", {"messages": HELLO} | fields)
            assert status == 200, answer
            texts = ("red", "green", "hm</think>red", "hm</think>green", "<think>hm</think>red")
            assert {text for text in texts if chats.takes(text)} == taken, fields
            assert not chats.takes("<think>a long thought</think>red") or "max_reasoning_tokens" not in fields
        await ask(chats)
        assert chats.served.handle.specs[-1].grammar is None, "free answers are not guided"


async def test_calls_come_after_the_reasoning(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
    formats = ChatFormats(HERMES, THINK)
    async with scripted_chats(tmp_path, formats, marks=(*MARKS, "<tool_call>", "</tool_call>")) as chats:
        chats.script(f"<think>{call}</think>\n\n{call}")
        for choice in ("auto", "required"):
            body = {"messages": HELLO, "tools": [WEATHER], "tool_choice": choice, "logprobs": True, "n": 2}
            status, answer = await post(chats.served, "/v1/chat/completions", body)
            assert status == 200
            for each in answer["choices"]:
                message = each["message"]
                assert (message["reasoning_content"], message["content"]) == (call, None)
                assert [one["function"]["name"] for one in message["tool_calls"]] == ["weather"]
                assert len(each["logprobs"]["content"]) == len(chats.served.scene.shard.model.script or ())
            assert chats.takes(f"<think>hm</think>\n\n{call}")
            assert chats.takes("hello") == (choice == "auto")


async def test_budgets_need_marks_that_are_tokens(tmp_path: Path) -> None:
    body = {"messages": HELLO, "max_reasoning_tokens": 5}
    for formats, text in ((THINKING, "no tokens"), (ChatFormats(), "--reasoning-parser")):
        async with scripted_chats(tmp_path / text, formats) as chats:
            status, answer = await post(chats.served, "/v1/chat/completions", body)
            assert (status, answer["error"]["param"]) == (400, "max_reasoning_tokens")
            assert text in answer["error"]["message"]


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "to be"}}\n</tool_call>'
STOPS: list[tuple[str, str, list[str], str | None, str, str | None]] = [
    # Model's text, prompt's opening, stop strings, reasoning, content, and the stop string that ends it.
    ("<think>to be</think>or not to be", "", ["be"], "to be", "or not to ", "be"),
    ("to be</think>or not to be", "<think>", ["be"], "to be", "or not to ", "be"),
    ("<think>to be</think>\n\nor not", "", ["\n\n", "to be"], "to be", "or not", None),
    ("<think>to be</think>or not", "", ["</think>", "<think>", "beor", "k>or"], "to be", "or not", None),
    ("<think>to be", "", ["be"], "to be", "", None),
    ("to be or not", "", ["be", "th"], None, "to ", "be"),
    ("<the other", "", ["<", "other"], None, "", "<"),
    ("<thin other", "", ["thi"], None, "<", "thi"),
    (" <think>so</think>be", "", [" "], "so", "be", None),
    (f"<think>to be</think>or{CALL}", "", ["be"], "to be", "or", None),
    (f"<think>to be</think>or not{CALL}", "", [" not", "be"], "to be", "or", " not"),
    (CALL, "<think>\n\n</think>\n\n", ["be", "{", "tool_call"], None, "", None),
]


@pytest.mark.parametrize("marks", [(), MARKS], ids=["texts", "tokens"])
async def test_stop_strings_end_the_content_only(marks: tuple[str, ...], tmp_path: Path) -> None:
    """Stop strings do not end reasoning, marks or calls. This holds too for strings that begin there and end
    in the content."""
    async with scripted_chats(tmp_path, ChatFormats(HERMES, THINK), marks=marks) as chats:
        for text, opening, stops, thought, content, ending in STOPS:
            ids, has_call = chats.script(text), CALL in text and ending is None
            # A stop string is noticed some steps later, on a busy machine many.
            chats.served.scene.shard.model.script = [*ids, *[EOS] * 32]
            fields = {"tools": [WEATHER], "stop": stops, "chat_template_kwargs": {"opening": opening}}
            status, whole = await post(chats.served, "/v1/chat/completions", {"messages": HELLO} | fields)
            assert status == 200, whole
            [choice] = whole["choices"]
            message = choice["message"]
            assert message["reasoning_content"] == thought, text
            assert (message["content"] or "") == content, text
            assert bool(message.get("tool_calls")) == has_call, text
            assert choice["stop_reason"] == ending, text
            assert (whole["usage"]["completion_tokens"] < len(ids)) == (ending is not None), text
            if not has_call:  # a call's id is random
                assert (await ask(chats, **fields))[0] == message
