"""Check calls that are written like Python against Python's own parser, for random splits of the text."""

import random

import pytest

from tests.support.answers import NAMES, CallText, parse, split_at_random, summarize, to_answer
from tests.support.python_answers import random_call, read_calls
from tgis.router.chat.answers.parser import AnswerParser
from tgis.router.chat.formats.registry import TOOL_FORMATS

FORMATS = {one.name: one for one in TOOL_FORMATS}


def parser(kind: str) -> AnswerParser:
    return AnswerParser(tools=FORMATS[kind], names=NAMES)


def check(kind: str, seed: int, count: int) -> None:
    r = random.Random(seed)
    for _ in range(count):
        calls = [random_call(r) for _ in range(r.choice([1, 2, 3]))]
        if kind == "pythonic":
            inner = f"[{', '.join(calls)}]"
            before, after = r.choice([("", ""), ("<|python_start|>", "<|python_end|>"), (" \n", "")])
        else:
            inner = "\n".join(calls)
            before, after = "<function_calls>\n", "\n</function_calls>"
        text = before + inner + after
        pieces = parse(parser(kind), [text])
        assert to_answer(pieces) == ("", read_calls(inner), ""), text
        assert parse(parser(kind), text) == pieces
        assert parse(parser(kind), split_at_random(r, text)) == pieces


@pytest.mark.parametrize("kind", ["pythonic", "olmo3"])
def test_calls_are_those_of_pythons_parser(kind: str) -> None:
    check(kind, 1, 60)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pythonic", "olmo3"])
def test_many_calls_are_those_of_pythons_parser(kind: str) -> None:
    check(kind, 2, 3000)


NO_CALLS = [
    "[1, 2]",
    "[f",
    "[f(",
    "[f(1)]",
    "[f(a=b)]",
    "[f(a=1+1)]",
    "[f(a=1 b=2)]",
    "[f(a=1, a=2)]",
    "a [f()]",
]
NO_CALLS += [
    "[nope()]",
    "[f_lon()]",
    "f()",
    "[f(a=__import__('os'))]",
    "[f(a=01)]",
    "[f(a='x' 'y')]",
    "[f(*x)]",
]
NO_CALLS += [
    "[f(a=(1, 2))]",
    "[f(a={1: 2})]",
    "[f(a='x)]",
    f"[f(a={'[' * 99}{']' * 99})]",
    "[",
    "",
    "[f(a='\\",
]


@pytest.mark.parametrize("text", NO_CALLS)
def test_text_that_is_no_call_is_content(text: str) -> None:
    for parts in ([text], [*text]):
        assert summarize(parse(parser("pythonic"), parts)) == ("", text, [])


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        ("pythonic", "[f(), ]", "", [("f", "{}")]),
        ("pythonic", "[f()", "", [("f", "{}")]),
        ("pythonic", "[f(a=1)] and more", "", [("f", '{"a": 1}')]),
        ("pythonic", "[f(a=1), nope()]", ", nope()]", [("f", '{"a": 1}')]),
        ("pythonic", "[f(a=true, b=null)]", "", [("f", '{"a": true, "b": null}')]),
        ("pythonic", "[f(a='\\ud83d')]", "", [("f", '{"a": "\\ud83d"}')]),
        ("pythonic", "[f(a='1\n2\\/')]", "", [("f", '{"a": "1\\n2/"}')]),
        ("olmo3", "I look.\n<function_calls>f()</function_calls> ok", "I look. ok", [("f", "{}")]),
        ("olmo3", "<function_calls>f(a=1)\nf_long(a=", "f_long(a=", [("f", '{"a": 1}')]),
    ],
)
def test_unusual_calls(kind: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for parts in ([text], [*text]):
        assert summarize(parse(parser(kind), parts)) == ("", content, [CallText(*call) for call in calls])
