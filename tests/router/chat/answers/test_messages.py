"""Check answers that are messages in channels, written by hand as gpt-oss writes them, split in any way."""

import random

import pytest

from tests.support import harmony_answers
from tests.support.answers import CallText, parse, split_at_random, summarize
from tgis.router.chat.answers.messages import MessageParser, MessageScope

NAMES = frozenset(("f", "get.it"))
OPENED = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>hm <b> <|x|> <|, so<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Yes."
CALL = (
    '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": "<|"}<|call|>'
)
THOUGHTS = "hm <b> <|x|> <|, so"
ARGUMENTS = '{"x": "<|"}'
# Text, then reasoning, content and calls.
CASES: dict[str, tuple[str, tuple[str, str, list[CallText]]]] = {
    "content": (f"{FINAL.removeprefix(OPENED)}<|return|>", ("", "Yes.", [])),
    "reasoning and content": (THOUGHT + FINAL, (THOUGHTS, "Yes.", [])),
    "two thoughts": (f"{THOUGHT}{OPENED}{THOUGHT}{FINAL}", (THOUGHTS * 2, "Yes.", [])),
    "a call": (THOUGHT + CALL, (THOUGHTS, "", [CallText("f", ARGUMENTS)])),
    "a call without an end": (CALL.removesuffix("<|call|>"), ("", "", [CallText("f", ARGUMENTS)])),
    "the function before the channel": (
        " to=functions.get.it<|channel|>commentary json<|message|>{}",
        ("", "", [CallText("get.it", "{}")]),
    ),
    "two calls": (THOUGHT + CALL + CALL, (THOUGHTS, "", [CallText("f", ARGUMENTS)] * 2)),
    "no arguments": (CALL.replace(ARGUMENTS, ""), ("", "", [CallText("f", "{}")])),
    "a comment": (
        f"<|channel|>commentary<|message|>I look.<|end|>{CALL}",
        ("", "I look.", [CallText("f", ARGUMENTS)]),
    ),
    "a call of an unknown function": (CALL.replace("functions.f", "functions.g"), ("", ARGUMENTS, [])),
    "reasoning for a tool of its own": (
        "<|channel|>analysis to=python code<|message|>1 + 1<|call|>",
        ("1 + 1", "", []),
    ),
    "cut in a header": (f"{THOUGHT}{OPENED}<|channel|>fin", (THOUGHTS, "", [])),
    "cut in a mark": ("<|channel|>final<|message|>Yes.<|retu", ("", "Yes.<|retu", [])),
    "cut after the first character of a mark": ("<|channel|>final<|message|>a <", ("", "a <", [])),
    "no message": (" Yes <|, no.", ("", " Yes <|, no.", [])),
    "nothing": ("", ("", "", [])),
}


@pytest.mark.parametrize("name", CASES)
def test_answers(name: str) -> None:
    text, expected = CASES[name]
    for parts in ([text], [*text], *(split_at_random(random.Random(seed), text) for seed in range(20))):
        assert summarize(parse(MessageParser(OPENED, True, NAMES), parts)) == expected


def test_reasoning_is_content_without_a_format_of_reasoning() -> None:
    pieces = parse(MessageParser(OPENED, False, NAMES), [THOUGHT + FINAL])
    assert summarize(pieces) == ("", f"{THOUGHTS}Yes.", [])


@pytest.mark.parametrize(
    ("opened", "expected"), [("analysis", ("so", "Yes.", [])), ("final", ("", "soYes.", []))]
)
def test_a_message_that_the_prompt_has_begun(opened: str, expected: tuple[str, str, list[CallText]]) -> None:
    parser = MessageParser(f"{OPENED}<|channel|>{opened}<|message|>", True, NAMES)
    assert parser.is_reasoning == (opened == "analysis")
    assert summarize(parse(parser, [f"so<|end|>{FINAL}"])) == expected


@pytest.mark.parametrize("name", CASES)
def test_stop_sequences_are_searched_in_content(name: str) -> None:
    """Spans are the whole text, and those to be searched are the content before the first call."""
    text, (_, content, _) = CASES[name]
    for seed in range(5):
        scope = MessageScope(OPENED, True, NAMES)
        parts = split_at_random(random.Random(seed), text)
        spans = [span for part in parts for span in scope.push(part)] + scope.flush()
        assert "".join(part for part, _ in spans) == text
        assert "".join(part for part, is_content in spans if is_content) == content


def check_random(seed: int, count: int) -> None:
    r, num_calls, num_thoughts = random.Random(seed), 0, 0
    for _ in range(count):
        text = harmony_answers.random_answer(r)
        expected = harmony_answers.read_messages(text)
        for parts in ([text], [*text], split_at_random(r, text)):
            assert summarize(parse(MessageParser(OPENED, True, NAMES), parts)) == expected, text
            scope = MessageScope(OPENED, True, NAMES)
            spans = [span for part in parts for span in scope.push(part)] + scope.flush()
            assert "".join(part for part, _ in spans) == text
        num_calls += len(expected[2])
        num_thoughts += bool(expected[0])
    assert min(num_calls, num_thoughts) > count / 10


def test_answers_are_those_of_a_second_reader() -> None:
    check_random(1, 150)


@pytest.mark.slow
def test_many_answers_are_those_of_a_second_reader() -> None:
    check_random(2, 20_000)
