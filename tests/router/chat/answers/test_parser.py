"""Answers are read as a second reader of whole texts reads them, however they are split."""

import random

import pytest

from tests.support.answers import KINDS, NAMES, Writer, parse, split_at_random, summarize, to_answer
from tgis.router.chat.answers.parser import AnswerParser
from tgis.router.chat.formats.registry import REASONING_FORMATS, TOOL_FORMATS

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
    assert FORMATS.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_a_second_reader(kind: str) -> None:
    check_texts(kind, 1, 60)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_answers_are_those_of_a_second_reader(kind: str) -> None:
    check_texts(kind, 2, 5000)
