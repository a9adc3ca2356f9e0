"""Tests the unsupported fields: each is refused by name, and values that request nothing are accepted."""

from pathlib import Path
from typing import Any

from tests.support.router.served_chats import HELLO, open_chats, post
from tgis.router.api.openai.chat.types import ChatRequest
from tgis.router.api.openai.completions.types import CompletionRequest
from tgis.router.api.openai.fields.refused_fields import IN_CHATS, REFUSED

NEUTRAL: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "modalities": ["text"],
    "length_penalty": 1,
    "skip_special_tokens": True,
    "best_of": 1,
    "echo": False,
    "use_beam_search": False,
    "suffix": "",
}


def test_every_field_belongs_to_a_request() -> None:
    known = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert not (REFUSED.keys() | IN_CHATS.keys()) - known


async def test_each_is_refused_by_name(tmp_path: Path) -> None:
    async with open_chats(tmp_path) as (served, _):
        in_chats = set(ChatRequest.__struct_fields__)
        for name in (REFUSED | IN_CHATS).keys() & in_chats:
            value: Any = False if name in ("skip_special_tokens", "spaces_between_special_tokens") else ["x"]
            expected = 200 if value is False else 400
            body = {"messages": HELLO, "max_tokens": 1, name: value}
            status, answer = await post(served, "/v1/chat/completions", body)
            assert status == 400 or expected == 200, name
            if status == 400:
                assert answer["error"]["param"] == name
                assert name in answer["error"]["message"]
        status, answer = await post(
            served, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 1} | NEUTRAL
        )
        assert status == 200, answer
        status, answer = await post(served, "/v1/completions", {"prompt": "a", "suffix": "b"})
        assert (status, answer["error"]["param"]) == (400, "suffix")
