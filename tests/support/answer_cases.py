"""Rules for answers in several formats, and an independent parser of answers that uses no grammar."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tgis.router.grammar.answer_rules import CallRule, CallRules, Mark, ReasoningRule

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 12},
        "s": {"type": "string", "maxLength": 4},
        "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["n"],
    "additionalProperties": False,
}
ARGUMENTS = [{"n": 3}, {"n": 12, "s": "é\n"}, {"n": 0, "b": [True, False]}, {"n": 7, "s": "</a>", "b": []}]
THINK, END_THINK = "<think>", "</think>"
NAMES = ("find", "find_all", "go.on-2")
"""Tool rules: the arguments of `find` must match SCHEMA; the others accept any object."""


def fits(name: str, arguments: Any) -> bool:
    """Check the arguments against SCHEMA in plain Python."""
    if name != NAMES[0] or not isinstance(arguments, dict):
        return isinstance(arguments, dict)
    n, s, b = arguments.get("n"), arguments.get("s", ""), arguments.get("b", [])
    is_integer = isinstance(n, int) and not isinstance(n, bool)
    is_list = isinstance(b, list) and len(b) <= 2 and all(isinstance(each, bool) for each in b)
    return is_integer and 0 <= n <= 12 and len(s) <= 4 and is_list and set(arguments) <= {"n", "s", "b"}


@dataclass(frozen=True)
class Format:
    """Format given as texts. `head` and `tail` surround the arguments of a call; %s is the function's
    name."""

    head: str
    tail: str
    trigger: str = ""
    begins_each: bool = False
    begin: str = ""
    between: str = ""
    end: str = ""
    marks: tuple[str, ...] = ()
    """Marks that are single tokens if the model has tokens for marks."""
    optional_mark: str = ""

    def rules(
        self, is_required: bool, token_id: Callable[[str], int | None], allows_several: bool = True
    ) -> CallRules:
        functions = tuple(
            CallRule(
                self.head % name,
                json.dumps(SCHEMA if name == NAMES[0] else {"type": "object"}),
                self.tail,
                True,
                f"tools[{i}].function.parameters",
            )
            for i, name in enumerate(NAMES)
        )
        return CallRules(
            trigger=Mark(self.trigger, token_id(self.trigger)) if self.trigger else None,
            begins_each=self.begins_each,
            begin=self.begin,
            between=self.between,
            end=self.end,
            functions=functions,
            is_required=is_required,
            allows_several=allows_several,
            marks=tuple(Mark(text, token_id(text)) for text in self.marks),
            optional_mark=Mark(self.optional_mark, token_id(self.optional_mark))
            if self.optional_mark
            else None,
        )

    def write(self, calls: list[tuple[str, str]]) -> str:
        lead = self.trigger + self.begin
        bodies = [(self.head % name) + arguments + self.tail for name, arguments in calls]
        return lead + (self.between + (lead if self.begins_each else "")).join(bodies) + self.end

    def read(self, text: str) -> tuple[str, list[tuple[str, Any]]]:
        """Return the text before the calls, and the calls. Raises ValueError for malformed calls."""
        if not self.trigger:
            head = rf'\s*(<\|python\|>|\{{\s*"name"\s*:\s*"({_ANY_NAME})"\s*,\s*"parameters"\s*:)'
            if not re.match(head, text):
                return text, []
            return "", self._read_calls(text.lstrip().removeprefix(self.optional_mark))
        content, trigger, rest = text.partition(self.trigger)
        return content, self._read_calls(trigger + rest) if trigger else []

    def _read_calls(self, text: str) -> list[tuple[str, Any]]:
        calls, rest = [], text
        while rest:
            rest = _after(rest, self.trigger + self.begin if self.begins_each or not calls else "")
            match = re.match(_pattern(self.head), rest)
            if not match:
                raise ValueError(f"no head: {rest!r}")
            arguments, length = json.JSONDecoder().raw_decode(rest[match.end() :])
            calls.append((match[1], arguments))
            rest = _after(rest[match.end() + length :], self.tail)
            if rest == self.end:
                return calls
            rest = _after(rest, self.between)
        raise ValueError("no end")


_ANY_NAME = "|".join(map(re.escape, NAMES))
FORMATS = {
    "tags": Format(
        head='{"name": "%s", "arguments": ',
        tail="}\n</call>",
        trigger="<call>",
        begins_each=True,
        begin="\n",
        between="\n",
        marks=("</call>",),
    ),
    "array": Format(
        head='{"name": "%s", "arguments": ', tail="}", trigger="[CALLS]", begin=" [", between=", ", end="]"
    ),
    "names": Format(head="%s[ARGS]", tail="", trigger="[CALL]", begins_each=True, marks=("[ARGS]",)),
    "section": Format(
        head="<|begin|>%s<|sep|>",
        tail="<|end|>",
        trigger="<|calls|>",
        end="<|no calls|>",
        marks=("<|begin|>", "<|sep|>", "<|end|>", "<|no calls|>"),
    ),
    "bare": Format(head='{"name": "%s", "parameters": ', tail="}", between="; ", optional_mark="<|python|>"),
}
MARKS = sorted(
    {THINK, END_THINK}
    | {text for form in FORMATS.values() for text in (form.trigger, *form.marks, form.optional_mark) if text}
)


def reasoning(
    token_id: Callable[[str], int | None],
    has_begun: bool,
    max_tokens: int | None = None,
    is_special: bool = False,
) -> ReasoningRule:
    begin = None if has_begun else Mark(THINK, token_id(THINK), is_special)
    return ReasoningRule(begin, Mark(END_THINK, token_id(END_THINK)), max_tokens)


def split_reasoning(text: str, has_begun: bool) -> tuple[str | None, str]:
    """Return the reasoning, or None if there is none, and the rest. Raises ValueError if the reasoning does
    not end."""
    if not has_begun:
        if not text.lstrip().startswith(THINK):
            return None, text
        text = text.lstrip().removeprefix(THINK)
    thoughts, end, rest = text.partition(END_THINK)
    if not end:
        raise ValueError("no end of the reasoning")
    return thoughts, rest.lstrip()


def random_answer(r: random.Random, form: Format, has_begun: bool) -> str:
    """Return an answer like a model's, often with an error."""
    thoughts = r.choice(["", "hm ", "a <call> or [CALL]? ", "<", "é🙂"])
    text = r.choice([thoughts + END_THINK + r.choice(["", "\n\n"]), ""])
    text = text if has_begun or not text else r.choice(["", "\n"]) + THINK + text
    text += r.choice(["", "", "", "", "Let me see. ", "{", '{"name": ', "[CALL", "<call"])
    if r.random() < 0.7:
        calls = [
            (r.choice(NAMES), json.dumps(r.choice(ARGUMENTS), ensure_ascii=False))
            for _ in range(r.randint(1, 3))
        ]
        text += form.write(calls)
    for _ in range(r.choice([0, 0, 1, 2])):
        at = r.randrange(len(text) + 1)
        text = text[:at] + r.choice(["", "x", '"', " ", "}", "<", "é"]) + text[at + r.randint(0, 2) :]
    return text


def _pattern(head: str) -> str:
    """Return a pattern of the head of any call that allows white space between the parts of its JSON."""
    before, _, after = head.partition("%s")
    loose = [re.sub(r'\\?\s+|(?<=[{:,"])(?=[{:,"])', r"\\s*", re.escape(part)) for part in (before, after)]
    return rf"\s*{loose[0]}({_ANY_NAME}){loose[1]}\s*"


def _after(text: str, begin: str) -> str:
    if not text.startswith(begin):
        raise ValueError(f"{text!r} does not begin with {begin!r}")
    return text[len(begin) :]
