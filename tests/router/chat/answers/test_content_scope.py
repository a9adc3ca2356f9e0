"""Check where stop strings are searched, against a reader of whole texts, for every split of the texts."""

import random
import re
from typing import NamedTuple

import pytest

from tgis.router.chat.answers.content_scope import ContentScope, Span
from tgis.router.chat.formats.granite import GRANITE
from tgis.router.chat.formats.hermes import HERMES
from tgis.router.chat.formats.llama import LLAMA3
from tgis.router.chat.formats.mistral import MISTRAL
from tgis.router.chat.formats.think import THINK
from tgis.router.chat.formats.types import ReasoningFormat, ToolFormat

NAMES = frozenset(("find", "go"))
PARTS = [
    *("<think>", "</think>", "<thi", "</", "\n", " ", "to be", "or not", "é", "{", "}", '{"a": 1}'),
    *('{"name": "find", "parameters": {"n": 1}}', '{"name": "none", "parameters": {}}', "<|python_tag|>"),
    *(
        '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>',
        "<tool_",
        "[TOOL_CALLS]",
        "<|tool_call|>",
    ),
]


class Kind(NamedTuple):
    reasoning: ReasoningFormat | None
    has_begun: bool
    tools: ToolFormat | None


KINDS = [
    Kind(reasoning, has_begun, tools)
    for reasoning, has_begun in ((None, False), (THINK, False), (THINK, True))
    for tools in (None, HERMES, LLAMA3, MISTRAL, GRANITE)
]


def read_whole(kind: Kind, text: str) -> str:
    """Return the content of a whole text with its white space, up to the first call."""
    if kind.reasoning is not None and (kind.has_begun or text.lstrip(" \t\r\n").startswith("<think>")):
        body = text if kind.has_begun else text.partition("<think>")[2]
        text = body.partition("</think>")[2].lstrip(" \t\r\n")
    if kind.tools is None:
        return text
    if kind.tools.trigger is not None:
        return text.partition(kind.tools.trigger)[0]
    call = r'\s*(<\|python_tag\|>)?\s*\{\s*"name"\s*:\s*"(find|go)"\s*,\s*"parameters"\s*:'
    return "" if re.match(call, text) else text


def divide(kind: Kind, text: str, r: random.Random) -> list[Span]:
    scope, spans, at = ContentScope(*kind, NAMES), [], 0
    while at < len(text):
        size = r.choice((1, 1, 2, 5, 100))
        spans += scope.push(text[at : at + size])
        at += size
    return spans + scope.flush()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_spans_do_not_depend_on_cuts(kind: Kind) -> None:
    r = random.Random(1)
    for _ in range(150):
        text = "".join(r.choices(PARTS, k=r.randrange(7)))
        spans = divide(kind, text, r)
        assert "".join(part for part, _ in spans) == text
        content = "".join(part for part, is_content in spans if is_content)
        assert content == read_whole(kind, text), text


def test_nothing_is_certain_before_it_is() -> None:
    scope = ContentScope(THINK, False, None, NAMES)
    assert scope.push("<thi") == []
    assert scope.push("s") == [("<this", True)]
    scope = ContentScope(THINK, False, HERMES, NAMES)
    assert scope.push("a <tool") == [("a ", True)]
    assert scope.push("s") == [("<tools", True)]
