"""Answers of models with calls, and an independent parser of them that uses regular expressions on the whole
text."""

import json
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tgis.router.chat.answers.messages import MessageParser
from tgis.router.chat.answers.parser import AnswerParser
from tgis.router.chat.answers.pieces import CallArguments, CallBegin, ContentText, Piece, ReasoningText

NAMES = frozenset(("f", "f_long", "look.up", "é-ü"))
SPACES = ["", "", "", " ", "\n", "\n\n", " \t\r\n"]


class Answer(NamedTuple):
    content: str
    calls: list[tuple[str, Any]]
    """Names, and arguments parsed as JSON."""
    reasoning: str = ""


class CallText(NamedTuple):
    name: str
    arguments: str


def join(pieces: Iterable[Piece]) -> list[Piece]:
    """Join adjacent pieces of one kind."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if not isinstance(piece, CallBegin) and last is not None and type(piece) is type(last):
            joined[-1] = type(piece)(last.text + piece.text)  # type: ignore[union-attr]
        else:
            joined.append(piece)
    return joined


def parse(parser: AnswerParser | MessageParser, parts: Iterable[str]) -> list[Piece]:
    pieces = [piece for part in parts for piece in parser.push(part)]
    return join([*pieces, *parser.flush()])


def summarize(pieces: Iterable[Piece]) -> tuple[str, str, list[CallText]]:
    """Return the reasoning, the content and the calls."""
    reasoning, content = "", ""
    calls: list[CallText] = []
    for piece in pieces:
        match piece:
            case ReasoningText(text):
                reasoning += text
            case ContentText(text):
                content += text
            case CallBegin(name):
                calls.append(CallText(name, ""))
            case CallArguments(text):
                calls[-1] = CallText(calls[-1].name, calls[-1].arguments + text)
    return reasoning, content, calls


def to_answer(pieces: Iterable[Piece]) -> Answer:
    reasoning, content, calls = summarize(pieces)
    return Answer(content, [(name, json.loads(arguments)) for name, arguments in calls], reasoning)


def split_at_random(r: random.Random, text: str) -> list[str]:
    cuts = sorted(r.choices(range(len(text) + 1), k=r.choice([1, 3, 20])))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@dataclass(frozen=True)
class Kind:
    """Format given as regular expressions, without surrounding white space."""

    begin: str
    """Pattern before the calls, or before each call if nothing separates them."""
    head: str
    """Pattern before the object of a call or of its arguments. Its group is the function's name."""
    tail: str = ""
    between: str | None = None
    end: str = ""
    keys: tuple[str, str] | None = ("name", "arguments")
    """Keys of the object; None if the object is the arguments."""
    drops_rest: bool = False

    def read(self, text: str) -> Answer:
        """Parse a text whose calls of known functions are complete."""
        content, position, calls, more = "", 0, list[tuple[str, Any]](), list[tuple[str, Any]]()
        while match := re.compile(r"\s*" + self.begin).search(text, position):
            is_dropping = self.drops_rest and bool(more)
            content += "" if is_dropping else text[position : match.start()]
            more, position = self._read_calls(text, match.end())
            content += "" if more else match[0].lstrip() if is_dropping else match[0]
            calls += more
            if self.begin.startswith(r"\A"):
                break
        rest = text[position:]
        is_call = bool(self.between and re.compile(rf"\s*{self.between}\s*{{").match(rest))
        is_dropped = bool(more) and ((self.drops_rest and not is_call) or not rest.strip())
        return Answer(content + ("" if is_dropped else rest), calls)

    def _read_calls(self, text: str, position: int) -> tuple[list[tuple[str, Any]], int]:
        calls, is_first = list[tuple[str, Any]](), True
        while call := self._read_call(text, position, "" if is_first else self.between or ""):
            position = call[1]
            calls.append(call[0])
            is_first = False
            if self.between is None:
                break
        end = re.compile(r"\s*" + self.end).match(text, position) if calls and self.end else None
        return calls, end.end() if end else position

    def _read_call(self, text: str, position: int, between: str) -> tuple[tuple[str, Any], int] | None:
        head = re.compile(rf"\s*{between}\s*{self.head}\s*").match(text, position)
        if head is None:
            return None
        try:
            value, end = json.JSONDecoder().raw_decode(text, head.end())
        except ValueError:
            return None
        call = (head[1], value) if self.keys is None else (value[self.keys[0]], value.get(self.keys[1], {}))
        tail = re.compile(r"\s*" + self.tail if self.tail else "").match(text, end)
        return (call, tail.end()) if tail and call[0] in NAMES else None


JSON, NAME = "(?=[{])", r"([^\s\[`{]+?)\s*"
ID = r"(?:\[CALL_ID\]\s*\w*\s*)?"
KINDS = {
    "hermes": Kind("<tool_call>", JSON, "</tool_call>"),
    "llama3": Kind(
        r"\A\s*(?:<\|python_tag\|>)?", JSON, between=";", keys=("name", "parameters"), drops_rest=True
    ),
    "mistral": Kind(r"\[TOOL_CALLS\]\s*\[", JSON, between=",", end=r"\]"),
    "mistral_v11": Kind(r"\[TOOL_CALLS\]", NAME + ID + r"\[ARGS\]", keys=None, drops_rest=True),
    "granite": Kind(r"<\|tool_call\|>\s*\[", JSON, between=",", end=r"\]"),
    "phi4": Kind(r"<\|tool_call\|>\s*\[", JSON, between=",", end=r"\]\s*<\|/tool_call\|>"),
    "phi4_functools": Kind(r"functools\[", JSON, between=",", end=r"\]"),
    "gemma4": Kind(r"<\|tool_call>", r"call:\s*([^\s{]+)", r"<tool_call\|>", keys=None),
    "deepseek_v3": Kind(
        "<｜tool▁calls▁begin｜>",
        r"<｜tool▁call▁begin｜>\s*function\s*<｜tool▁sep｜>\s*" + NAME + "```json",
        r"```\s*<｜tool▁call▁end｜>",
        between="",
        end="<｜tool▁calls▁end｜>",
        keys=None,
    ),
    "deepseek_v31": Kind(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>" + r"\s*([^\s<]+?)\s*<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        between="",
        end="<｜tool▁calls▁end｜>",
        keys=None,
    ),
}


_QWEN_END = r"</function>\s*</tool_call>\s*"
_DSML_END = r"</｜DSML｜parameter>\s*)*)</｜DSML｜invoke>"
TAGGED_KINDS = {
    "glm45": (
        r"<tool_call>\s*(f_long|f|look\.up|é-ü)\s*((?:<arg_key>.*?</arg_value>\s*)*)</tool_call>\s*",
        r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
    ),
    "qwen3_coder": (
        r"<tool_call>\s*<function=(f_long|f|look\.up|é-ü)>\s*((?:<parameter=.*?</parameter>\s*)*)"
        + _QWEN_END,
        r"<parameter=(.*?)>\n(.*?)\n</parameter>",
    ),
    "deepseek_v32": (
        r'<｜DSML｜invoke name="(f_long|f|look\.up|é-ü)">\s*((?:<｜DSML｜parameter .*?' + _DSML_END,
        r'<｜DSML｜parameter name="(.*?)" string="((?:true|false)">.*?)</｜DSML｜parameter>',
    ),
}
"""Patterns of a call and of an argument, for formats whose arguments are between tags."""


def read_tagged(kind: str, text: str, texts: set[tuple[str, str]]) -> list[tuple[str, Any]]:
    """Return the complete calls in a text. `texts` are the functions and keys whose values are texts."""
    call, argument = (re.compile(pattern, re.DOTALL) for pattern in TAGGED_KINDS[kind])
    return [
        (name, {key: _tagged_value(value, (name, key) in texts) for key, value in argument.findall(body)})
        for name, body in call.findall(text)
    ]


def _tagged_value(text: str, is_text: bool) -> Any:
    if text.startswith(('true">', 'false">')):  # only version 3.2 of DeepSeek
        kind, _, text = text.partition('">')
        is_text = kind == "true"
    try:
        return text if is_text else json.loads(text)
    except ValueError:
        return text


class Writer:
    """Writer of random answers in one format."""

    def __init__(self, kind: str, seed: int) -> None:
        self._kind, self._r = kind, random.Random(seed)

    def answer(self) -> str:
        r = self._r
        names = r.choices(
            [*sorted(NAMES), "nope"], weights=[6] * len(NAMES) + [1], k=r.choice([0, 1, 1, 2, 3])
        )
        calls = self._calls([self._call(name) for name in names]) if names else ""
        before = "" if self._kind == "llama3" and r.random() < 0.9 else self._text()
        return before + calls + (self._text() if calls and r.random() < 0.3 else "")

    def _calls(self, calls: list[str]) -> str:
        s = self._space
        match self._kind:
            case "hermes":
                return s().join(f"<tool_call>{s()}{call}{s()}</tool_call>{s()}" for call in calls)
            case "llama3":
                return self._r.choice(["", "<|python_tag|>"]) + s() + f"{s()};{s()}".join(calls) + s()
            case "mistral":
                return f"[TOOL_CALLS]{s()}[{s()}" + f"{s()},{s()}".join(calls) + f"{s()}]{s()}"
            case "gemma4":
                return "".join(f"<|tool_call>{s()}call:{call}{s()}<tool_call|>{s()}" for call in calls)
            case "mistral_v11":
                return "".join(f"[TOOL_CALLS]{call}{s()}" for call in calls)
            case "granite":
                return f"<|tool_call|>{s()}[{s()}" + f"{s()},{s()}".join(calls) + f"{s()}]{s()}"
            case "phi4":
                return f"<|tool_call|>{s()}[" + f"{s()},{s()}".join(calls) + f"{s()}]{s()}<|/tool_call|>{s()}"
            case "phi4_functools":
                return "functools[" + f"{s()},{s()}".join(calls) + f"{s()}]"
        begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
        joined = "".join(f"{s()}{begin}{s()}{call}{s()}{end}" for call in calls)
        return f"<｜tool▁calls▁begin｜>{joined}{s()}<｜tool▁calls▁end｜>{s()}"

    def _call(self, name: str) -> str:
        r, s, arguments = self._r, self._space, self._json(self._value(0))
        match self._kind:
            case "mistral_v11":
                call_id = r.choice(["", f"[CALL_ID]{s()}aB3{s()}"])
                return f"{s()}{name}{s()}{call_id}[ARGS]{s()}{arguments}"
            case "deepseek_v3":
                return f"function{s()}<｜tool▁sep｜>{s()}{name}{s()}```json{s()}{arguments}{s()}```"
            case "gemma4":
                return f"{s()}{name}{s()}{arguments}"
            case "deepseek_v31":
                return f"{name}{s()}<｜tool▁sep｜>{s()}{arguments}"
        key = "parameters" if self._kind == "llama3" else "arguments"
        written = r.choice([arguments, arguments, json.dumps(arguments), "null", "[1]", "-1.5e3"])
        members = [f'"name"{s()}:{s()}{json.dumps(name)}', f'"{key}"{s()}:{s()}{written}']
        members += r.choice([[], [], ['"type": "function"'], ['"id": "abc\\""']])
        members = r.choice([members, members, members[::-1], r.sample(members, len(members)), members[:1]])
        return "{" + s() + f"{s()},{s()}".join(members) + s() + "}"

    def _value(self, depth: int) -> dict[str, Any]:
        r = self._r
        values: list[Callable[[], Any]] = [
            self._text,
            lambda: r.choice([1, -2.5, 1e300, True, None, "\ud83d"]),
        ]
        if depth < 3:
            values += [lambda: self._value(depth + 1), lambda: [self._value(depth + 1)]]
        return {self._text(): r.choice(values)() for _ in range(r.choice([0, 1, 3]))}

    def _json(self, value: Any) -> str:
        return json.dumps(
            value, ensure_ascii="\\ud83d" in json.dumps(value), indent=self._r.choice([None, 1])
        )

    def _space(self) -> str:
        return self._r.choice(SPACES)

    def _text(self) -> str:
        pieces = [
            "Hello",
            " two words ",
            "\n",
            "é東🙂",
            '{"a": "}]',
            "\\",
            "<",
            "[",
            "functools",
            "<tool_cal",
        ]
        return "".join(self._r.choices(pieces, k=self._r.choice([0, 1, 3])))
