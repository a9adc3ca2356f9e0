"""Reasoning in chats, over a real socket and with the openai client."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.router.chat_door import HELLO, post
from tests.support.router.http_door import MODEL
from tests.support.router.scripted_chats import ScriptedChats, scripted_chats
from tgis.router.chat.formats.registry import ChatFormats
from tgis.router.chat.formats.think import THINK

THINKING = ChatFormats(reasoning=THINK)
MARKS = ("<think>", "</think>")


async def ask(chats: ScriptedChats, **fields: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return message, usage and finish reason of an answer, which are the same if it is streamed."""
    body = {"messages": HELLO} | fields
    status, whole = await post(chats.door, "/v1/chat/completions", body)
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
    told = {name: value for name, value in choice["message"].items() if value is not None}
    assert message == told
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
        ):
            ids = chats.script(text)
            variables = {"opening": opening}
            message, usage, reason = await ask(chats, chat_template_kwargs=variables)
            assert reason == "stop"
            assert (message["reasoning_content"], message["content"]) == (thought, content)
            num = usage["completion_tokens_details"]["reasoning_tokens"]
            spelled = text.partition("</think>")
            reasoned = chats.door.tokenizer.fast.encode(spelled[0] + spelled[1], add_special_tokens=False).ids
            expected = 0 if thought is None else len(reasoned) if spelled[1] else len(ids)
            # A mark that is no token is only known once the text after it has begun.
            assert expected <= num <= expected + (marks == "texts"), text
            hidden, _, _ = await ask(chats, chat_template_kwargs=variables, include_reasoning=False)
            assert hidden == {"role": "assistant", "content": content, "refusal": None}
