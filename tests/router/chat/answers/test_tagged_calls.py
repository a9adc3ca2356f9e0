"""Check calls with arguments between tags against a second reader, for random splits of the text."""

import json
import random

import pytest

from tests.support.answers import (
    NAMES,
    TAGGED_KINDS,
    CallText,
    parse,
    read_tagged,
    split_at_random,
    summarize,
    to_answer,
)
from tgis.router.chat.answers.parser import AnswerParser
from tgis.router.chat.formats.registry import TOOL_FORMATS

FORMATS = {one.name: one for one in TOOL_FORMATS}
TEXTS = {("f", "s"), ("look.up", "s")}
VALUES = [
    "1",
    "-2.5e3",
    "null",
    '{"a": [1, "x"]}',
    '"q"',
    "word",
    "two\nlines",
    " é🙂 ",
    "<b>",
    "a </tool_call>",
]


def parser(kind: str) -> AnswerParser:
    return AnswerParser(tools=FORMATS[kind], names=NAMES, texts=TEXTS)


def write_all(kind: str, r: random.Random) -> str:
    calls = [write(kind, r) for _ in range(r.choice([1, 2, 3]))]
    if kind == "deepseek_v32":
        return f"<｜DSML｜function_calls>\n{''.join(calls)}</｜DSML｜function_calls>"
    return "\n".join(calls)


def write(kind: str, r: random.Random) -> str:
    name = r.choice([*sorted(NAMES)])
    space = r.choice(["", "\n", " \n"])
    values = {key: r.choice(VALUES) for key in r.sample(["s", "n", "two words"], r.randrange(4))}
    if kind == "glm45":
        pairs = (f"<arg_key>{k}</arg_key>{space}<arg_value>{v}</arg_value>" for k, v in values.items())
        return f"<tool_call>{space}{name}\n{space.join(pairs)}{space}</tool_call>"
    if kind == "deepseek_v32":
        end = f"</｜DSML｜parameter>{space}"
        pairs = (
            f'<｜DSML｜parameter name="{k}" string="{r.choice(["true", "false"])}">{v}{end}'
            for k, v in values.items()
        )
        return f'<｜DSML｜invoke name="{name}">{space}{"".join(pairs)}</｜DSML｜invoke>{space}'
    pairs = (f"<parameter={k}>\n{v}\n</parameter>{space}" for k, v in values.items())
    return f"<tool_call>{space}<function={name}>{space}{''.join(pairs)}</function>{space}</tool_call>"


@pytest.mark.parametrize("kind", TAGGED_KINDS)
def test_calls_are_those_of_a_second_reader(kind: str) -> None:
    r = random.Random(1)
    for _ in range(60):
        text = write_all(kind, r)
        pieces = parse(parser(kind), [text])
        assert to_answer(pieces) == ("", read_tagged(kind, text, TEXTS), ""), text
        assert parse(parser(kind), text) == pieces
        assert parse(parser(kind), split_at_random(r, text)) == pieces


GLM = "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>"
GLM47 = "<tool_call>f<arg_key>s</arg_key><arg_value>"
QWEN = "<tool_call>\n<function=f>\n<parameter=n>\n"
DSML = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="'
MALFORMED = ["<tool_call>f", "<tool_call>f_lon\n</tool_call>", "<tool_call>nope\n</tool_call>"]
MALFORMED += ["<tool_call>f\n<arg_key>s", "<tool_call>f\n<arg_key>s</arg_key>x"]


@pytest.mark.parametrize("text", MALFORMED)
def test_text_that_is_no_call_is_content(text: str) -> None:
    assert summarize(parse(parser("glm45"), text)) == ("", text, [])


@pytest.mark.parametrize(
    ("kind", "text", "content", "arguments"),
    [
        ("glm45", f"{GLM}1</arg_value>\n", "", '{"s": "1"}'),
        ("glm45", f"{GLM}wo", "", '{"s": '),
        ("glm45", f"{GLM47}1</arg_value></tool_call>", "", '{"s": "1"}'),
        ("qwen3_coder", f"hi\n{QWEN}True\n</parameter>\n</function>\n</tool_", "hi", '{"n": true}'),
        ("deepseek_v32", f'{DSML}n" string="false">1</｜DSML｜par', "", '{"n": '),
        ("deepseek_v32", f'hi\n\n{DSML}n" string="true">1</｜DSML｜parameter>\n', "hi", '{"n": "1"}'),
        ("deepseek_v32", f'{DSML}a"b" string="true">1</｜DSML｜parameter>', "", '{"a\\"b": "1"}'),
        ("qwen3_coder", f"{QWEN}NaN\n</parameter>\n</function>\n</tool_call>ok", "ok", '{"n": "NaN"}'),
    ],
)
def test_unusual_calls(kind: str, text: str, content: str, arguments: str) -> None:
    for parts in ([text], [*text]):
        assert summarize(parse(parser(kind), parts)) == ("", content, [CallText("f", arguments)])


def test_values_follow_the_schema() -> None:
    text = f"{GLM}5</arg_value>\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"
    [(_, arguments)] = to_answer(parse(parser("glm45"), text)).calls
    assert json.dumps(arguments) == '{"s": "5", "n": 5}'
