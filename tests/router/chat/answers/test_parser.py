"""Check the answer parser against a second reader of whole texts, for every split of the texts."""

import itertools
import random

import pytest

from tests.support.answers import (
    KINDS,
    NAMES,
    TAGGED_KINDS,
    Writer,
    parse,
    split_at_random,
    summarize,
    to_answer,
)
from tgis.router.chat.answers.parser import AnswerParser
from tgis.router.chat.answers.pieces import CallArguments, CallBegin, ContentText, Piece, ReasoningText
from tgis.router.chat.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from tgis.router.chat.formats.types import PythonCall

FORMATS = {one.name: one for one in TOOL_FORMATS}
THINK, GRANITE = (next(one for one in REASONING_FORMATS if one.name == name) for name in ("think", "granite"))


def parser(kind: str | None) -> AnswerParser:
    return AnswerParser(tools=None if kind is None else FORMATS[kind], names=NAMES)


def check_texts(kind: str, seed: int, count: int) -> None:
    writer, r, num_calls = Writer(kind, seed), random.Random(seed), 0
    for _ in range(count):
        text = writer.answer()
        pieces = parse(parser(kind), [text])
        assert to_answer(pieces) == KINDS[kind].read(text), text
        assert all(call.arguments in text or call.arguments == "{}" for call in summarize(pieces)[2])
        assert parse(parser(kind), text) == pieces, text
        assert parse(parser(kind), split_at_random(r, text)) == pieces, text
        num_calls += len(summarize(pieces)[2])
    assert num_calls > count / 2


def test_every_format_has_a_second_reader() -> None:
    # test_messages has the reader of messages in channels.
    # test_python_calls has the reader of calls that are written like Python.
    formats = {
        one.name for one in TOOL_FORMATS if not one.is_channel and not isinstance(one.body, PythonCall)
    }
    assert formats == KINDS.keys() | TAGGED_KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_a_second_reader(kind: str) -> None:
    check_texts(kind, 1, 25)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_answers_are_those_of_a_second_reader(kind: str) -> None:
    check_texts(kind, 2, 2000)


def read(kind: str | None, text: str) -> list[Piece]:
    """Return the pieces of a text, and check that they are the same for every split.

    Every split into two parts and into characters is tried; short texts are also split into three parts."""
    pieces = parse(parser(kind), [text])
    assert parse(parser(kind), text) == pieces
    cuts = range(len(text) + 1)
    for first, second in itertools.combinations(cuts, 2) if len(text) < 25 else [(cut, cut) for cut in cuts]:
        assert parse(parser(kind), [text[:first], text[first:second], text[second:]]) == pieces
    return pieces


def call(arguments: str, name: str = "f") -> list[Piece]:
    return [CallBegin(name), CallArguments(arguments)]


F, G = '{"name": "f", "arguments": {}}', '{"name": "f_long", "arguments": [1]}'


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        (" \n", [ContentText(" \n")]),
        ("a <tool_call", [ContentText("a <tool_call")]),
        ("<tool_call>", [ContentText("<tool_call>")]),
        (f"a \n<tool_call>{F}", [ContentText("a"), *call("{}")]),
        (f"<tool_call>{F}</tool_call>\n \n", call("{}")),
        (f"<tool_call>{F}\n</tool_", call("{}")),
        (f"<tool_call>{F} <", call("{}")),
        (f"<tool_call>{F}</tool_call>\nend", [*call("{}"), ContentText("\nend")]),
        (f"<tool_call>{F}<tool_call>{F}", call("{}") * 2),
        (f"<tool_call>{F} text", [*call("{}"), ContentText(" text")]),
        (f"<tool_call> <tool_call>{F}", [ContentText("<tool_call>"), *call("{}")]),
        ('<tool_call>{"name": "f", "arguments":', [ContentText('<tool_call>{"name": "f", "arguments":')]),
        ('<tool_call>{"name": "f", "arguments": {"a', call('{"a')),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', call('"{\\"a\\": 1}"')),
        ('<tool_call>{"name": "f", "arguments": nul', call("nul")),
        ('<tool_call>{"name": "f", "arguments": }', [ContentText('<tool_call>{"name": "f", "arguments": }')]),
        ('<tool_call>{"name": "f"}</tool_call>', call("{}")),
        ('<tool_call>{"arguments": {}}', [ContentText('<tool_call>{"arguments": {}}')]),
        ('<tool_call>{"arguments": {"x": 1}, "name": "f"}', call('{"x": 1}')),
        ('<tool_call>{"name": "\\u0066", "arguments": {}}', call("{}")),
        ('<tool_call>{"name": "f", "arguments": {}</tool_call>', call("{}")),
        ('<tool_call>{"name": "f", "arguments": {}, "id": [{}]}</tool_call>', call("{}")),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}', call('{"a": "</tool_call>"}')),
        ('<tool_call>{"name": "f", "arguments": {}}}', [*call("{}"), ContentText("}")]),
    ],
)
def test_calls_of_hermes(text: str, pieces: list[Piece]) -> None:
    assert read("hermes", text) == pieces
    assert "".join(piece.text for piece in read(None, text) if isinstance(piece, ContentText)) == text


@pytest.mark.parametrize(
    ("kind", "text", "pieces"),
    [
        ("mistral", f"[TOOL_CALLS] [{F}, {G}", call("{}") + call("[1]", "f_long")),
        ("mistral", f"[TOOL_CALLS][{F}]\n[TOOL_CALLS][{F}]", call("{}") * 2),
        ("mistral", f"[TOOL_CALLS] [{F} \n", call("{}")),
        ("mistral", f"[TOOL_CALLS] {F}", [ContentText(f"[TOOL_CALLS] {F}")]),
        ("mistral", f"[TOOL_CALLS] [{F} text", [*call("{}"), ContentText(" text")]),
        ("mistral_v11", "a[TOOL_CALLS]f[ARGS]{}", [ContentText("a"), *call("{}")]),
        (
            "mistral_v11",
            "[TOOL_CALLS]f[ARGS]{} text [TOOL_CALLS]f_long[ARGS]{}",
            call("{}") + call("{}", "f_long"),
        ),
        ("mistral_v11", "[TOOL_CALLS]f[ARGS]5", [ContentText("[TOOL_CALLS]f[ARGS]5")]),
        ("mistral_v11", "[TOOL_CALLS]f_lon[ARGS]{}", [ContentText("[TOOL_CALLS]f_lon[ARGS]{}")]),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {}} text', call("{}")),
        ("llama3", '{"name": "f", "parameters": {}};', call("{}")),
        ("llama3", '{"name": "f", "parameters": {}};{"a', [*call("{}"), ContentText(';{"a')]),
        ("llama3", ' {"name": "f", "arguments": {}}', [ContentText(' {"name": "f", "arguments": {}}')]),
        ("llama3", '{"title": "f"} ', [ContentText('{"title": "f"} ')]),
        ("phi4", f"<|tool_call|>[{F}]<|/tool", call("{}")),
        ("phi4", f"<|tool_call|>[{F}]<|/tool_call|>.", [*call("{}"), ContentText(".")]),
    ],
)
def test_calls_of_other_formats(kind: str, text: str, pieces: list[Piece]) -> None:
    assert read(kind, text) == pieces


def test_without_names_nothing_is_a_call() -> None:
    text = f"<tool_call>{F}</tool_call>"
    assert parse(AnswerParser(tools=FORMATS["hermes"]), text) == [ContentText(text)]


@pytest.mark.parametrize(
    ("text", "has_begun", "reasoning", "content"),
    [
        ("<think>a</think>\n\nb", False, "a", "b"),
        (" \n<think>\na\n</think>b</think>", False, "\na\n", "b</think>"),
        ("a</think> b ", True, "a", "b "),
        (" <think>a", False, "a", ""),
        ("<think>a</think> ", False, "a", ""),
        ("<think>a</think>b", True, "<think>a", "b"),
        ("a</think", True, "a</think", ""),
        ("", True, "", ""),
        ("</think>", True, "", ""),
        ("a <think>b</think>", False, "", "a <think>b</think>"),
        (" <thin", False, "", " <thin"),
        ("a</</think>b", True, "a</", "b"),
    ],
)
@pytest.mark.parametrize("kind", [None, "hermes", "llama3"])
def test_reasoning_comes_first(
    text: str, has_begun: bool, reasoning: str, content: str, kind: str | None
) -> None:
    tools = None if kind is None else FORMATS[kind]
    for parts in ([text], text, [text[:5], text[5:]]):
        pieces = parse(AnswerParser(THINK, has_begun, tools, NAMES), parts)
        assert summarize(pieces) == (reasoning, content, [])


def test_calls_follow_reasoning_and_are_none_in_it() -> None:
    text = f"<think><tool_call>{F}</tool_call></think>\n<tool_call>{F}</tool_call>"
    pieces = parse(AnswerParser(THINK, False, FORMATS["hermes"], NAMES), text)
    assert pieces == [ReasoningText(f"<tool_call>{F}</tool_call>"), *call("{}")]
    llama = '</think>\n{"name": "f", "parameters": {}}'
    assert parse(AnswerParser(THINK, True, FORMATS["llama3"], NAMES), llama) == call("{}")


def test_granites_reasoning_is_between_sentences() -> None:
    text = "Here is my thought process:\n\na\n\nHere is my response:\n\nb"
    pieces = parse(AnswerParser(GRANITE), text)
    assert pieces == [ReasoningText("\n\na\n\n"), ContentText("b")]


def test_a_parser_reports_whether_it_reads_reasoning() -> None:
    begun, other = AnswerParser(THINK, True), AnswerParser(THINK)
    assert (begun.is_reasoning, other.is_reasoning) == (True, False)
    seen = [
        (parser.push(part) and None, parser.is_reasoning)[1]
        for parser in (begun, other)
        for part in ("<think>", "a", "</think", ">", "b")
    ]
    assert seen == [True, True, True, False, False] * 2
    begun.flush()
    assert not begun.is_reasoning


def test_certain_text_is_shown_at_once() -> None:
    reader = AnswerParser(THINK, True, FORMATS["hermes"], NAMES)
    steps: list[tuple[str, list[Piece]]] = [
        ("a ", [ReasoningText("a ")]),
        ("b<", [ReasoningText("b")]),
        ("/think>", []),
        ("\nHello", [ContentText("Hello")]),
        (" ", []),
        ("you <", [ContentText(" you")]),
        ("b", [ContentText(" <b")]),
        (" <tool_call>\n", []),
        ('{"name": "f', []),
        ('", "arguments": ', []),
        ("{", call("{")),
        ('"a": "\\', [CallArguments('"a": "\\')]),
        ('""}}\n', [CallArguments('""}')]),
        ("</tool_call>\n", []),
    ]
    for part, pieces in steps:
        assert reader.push(part) == pieces
    assert reader.flush() == []
