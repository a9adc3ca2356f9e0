"""Check that the answer parser loses no text of hostile answers, keeps its order, and takes linear time."""

import json
import random
import time
from collections.abc import Iterable

import pytest

from tests.support.answers import KINDS, NAMES, Writer, join, parse, split_at_random, summarize
from tgis.router.chat.answers.parser import AnswerParser
from tgis.router.chat.answers.pieces import CallArguments, CallBegin, Piece
from tgis.router.chat.formats.registry import REASONING_FORMATS, TOOL_FORMATS

THINK = next(one for one in REASONING_FORMATS if one.name == "think")
FORMATS = {one.name: one for one in TOOL_FORMATS}
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"]
MARKS += ["functools[", "<|tool_call|>", "<|/tool_call|>", "<|python_tag|>", "<｜tool▁calls▁begin｜>"]
MARKS += [
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "function",
]
TEXTS = [*'{}[]:,;"\\ \n1-é🙂\x00', "\\u", "\\ud83d", "\ud83d", "null", "word", "f_long", "```json", "```"]
TEXTS += ['"name"', '"arguments"', '"parameters"', '"id"', '"f"', '"nope"', '{"arguments": {"<tool_call>": "']
MB = 1 << 20


def parser(kind: str | None, has_begun: bool = False) -> AnswerParser:
    return AnswerParser(THINK, has_begun, None if kind is None else FORMATS[kind], NAMES)


def hostile_text(r: random.Random, writer: Writer) -> str:
    """Return an answer with texts inserted into it, or in place of its parts."""
    text = r.choice(["", "<think>x</think>"]) + writer.answer()
    for _ in range(r.randrange(10)):
        begin = r.randrange(len(text) + 1)
        part = r.choice(r.choice([MARKS, TEXTS, TEXTS]))
        part = part[: r.randrange(len(part) + 1)] if r.random() < 0.2 else part
        text = text[:begin] + part + text[begin + r.choice([0, 0, 1, 5]) :]
    return text


def spell(pieces: Iterable[Piece]) -> str:
    """Return a text that spells the pieces, independent of their split."""
    return "".join(
        f"<{type(p).__name__}>{p.name if isinstance(p, CallBegin) else p.text}" for p in join(pieces)
    )


def is_in_order(pieces: Iterable[Piece], text: str, are_converted: bool) -> bool:
    """Return True if the pieces are parts of the text in order. Arguments that `are_converted` from another
    notation may instead be any JSON object."""
    position = 0
    for piece in pieces:
        if isinstance(piece, CallBegin) or piece == CallArguments("{}"):
            continue
        begin = text.find(piece.text, position)
        if begin < 0 and are_converted and isinstance(piece, CallArguments):
            assert isinstance(json.loads(piece.text), dict)
        elif begin < 0:
            return False
        else:
            position = begin + len(piece.text)
    return True


def check_hostile(seed: int, count: int) -> None:
    r, num_calls = random.Random(seed), 0
    writers = {kind: Writer(kind, seed) for kind in KINDS}
    for _ in range(count):
        written, has_begun = r.choice([*KINDS]), r.random() < 0.2
        text = hostile_text(r, writers[written])
        kind = r.choice([written] * 4 + [None, *KINDS])
        pieces = parse(parser(kind, has_begun), [text])
        assert parse(parser(kind, has_begun), text) == pieces, (kind, text)
        parts = split_at_random(r, text)
        assert parse(parser(kind, has_begun), parts) == pieces, (kind, parts)
        reader = parser(kind, has_begun)
        begin = spell(piece for part in parts[:-1] for piece in reader.push(part))
        assert spell(pieces).startswith(begin), "pieces are never withdrawn"
        assert is_in_order(pieces, text, are_converted=kind == "gemma4"), (kind, text)
        reasoning, content, calls = summarize(pieces)
        num_calls += len(calls)
        assert all(call.name in NAMES and call.arguments for call in calls)
        if not calls and not reasoning and not has_begun and not text.strip().startswith("<think>"):
            assert content == text
    assert num_calls > count / 10


def test_hostile_texts_keep_their_order() -> None:
    check_hostile(1, 200)


@pytest.mark.slow
def test_many_hostile_texts_keep_their_order() -> None:
    check_hostile(2, 20_000)


def test_nesting_has_no_limit() -> None:
    arguments = '{"a":[' * 20_000 + "]}" * 20_000
    pieces = parse(
        parser("hermes"), ['<tool_call>{"name": "f", "arguments": ', arguments, "}</tool_call> end"]
    )
    assert summarize(pieces) == ("", " end", [("f", arguments)])


FLOODS = [
    ("hermes", "", "{"),
    ("hermes", "", "<"),
    ("hermes", "", " "),
    ("hermes", "", "<tool_call> "),
    ("hermes", "", "<tool_call>{"),
    ("hermes", "", '<tool_call>{"arguments": {"'),
    ("hermes", "<tool_call>", " "),
    ("hermes", '<tool_call>{"', "a"),
    ("hermes", '<tool_call>{"arguments": ', "{"),
    ("hermes", '<tool_call>{"name": "f", "arguments": ', "{"),
    ("hermes", '<tool_call>{"name": "f", "arguments": "', "\\"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}', ',"a":1'),
    ("hermes", "<tool_call>{", '"type":"x",'),
    ("hermes", "<think>", "</think"),
    ("llama3", "", "{"),
    ("llama3", '{"name": "f", "parameters": {}}', ";"),
    ("mistral", "[TOOL_CALLS]", "["),
    ("mistral_v11", "", "[TOOL_CALLS]f"),
    ("deepseek_v31", "", "<｜tool▁calls▁begin｜>"),
    ("pythonic", "[f(a=", "["),
    ("pythonic", "[f(a='", "\\"),
    ("pythonic", "[", "f(),"),
    ("olmo3", "<function_calls>", "f(a=1)\n"),
    ("deepseek_v32", '<｜DSML｜function_calls><｜DSML｜invoke name="f">', '<｜DSML｜parameter name="'),
]


def cpu_s(kind: str, text: str, size: int) -> float:
    reader, started_at = parser(kind), time.process_time()
    for index in range(0, len(text), size):
        reader.push(text[index : index + size])
    reader.flush()
    return time.process_time() - started_at


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, MB], ids=["parts", "whole"])
@pytest.mark.parametrize(("kind", "begin", "text"), FLOODS)
def test_a_megabyte_takes_linear_time(kind: str, begin: str, text: str, size: int) -> None:
    small, large = (begin + text * (count // len(text)) for count in (MB // 16, MB))
    took_small = min(cpu_s(kind, small, size) for _ in range(3))
    took = cpu_s(kind, large, size)
    assert took < 40 * took_small + 0.1, f"{took:.2f} s, and {took_small:.3f} s for a 16th"
    assert took < 20
