"""Writes the grammar of a whole answer: reasoning, then text or tool calls.

If a mark is one token, the grammar uses that token, and texts before it exclude the mark's text. The grammar
library's lexer takes the longest match. So a text that another part can follow must end unambiguously: at a
token that no text matches, or by an exclusion."""

import json
import re
from collections.abc import Callable, Iterator, Sequence

from tgis.router.grammar.answer_rules import AnswerRules, CallRule, CallRules, Mark, ReasoningRule, Tags
from tgis.router.grammar.argument_notation import UNWRITABLE_NAME, NotationWriter
from tgis.router.grammar.conversion import HEADER
from tgis.router.grammar.errors import InvalidGrammarError
from tgis.router.grammar.json_schema.reading import read_schema
from tgis.router.grammar.message_grammar import write_message_grammar
from tgis.router.grammar.parameters import FunctionParameter, allows_any, read_parameters
from tgis.router.grammar.tagged_texts import matches_nothing, read_text_patterns

ANYTHING = "(?s:.*)"
BLANKS = r"[ \t\r\n]{0,8}"
_SPECIAL_CHARACTERS = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
_HEAD_PART = re.compile(r'"(?:[^"\\]|\\.)*"|[\w.-]+|[^\s"]')
_LAST_KEY = re.compile(r'("[^"]*")\s*:\s*$')

_KEY = r"KEY: /[^<>\n\"]+/"


def write_answer_grammar(rules: AnswerRules, text_grammar: str | None, number: Callable[[int], int]) -> str:
    """Return the grammar of an answer. Its text, apart from reasoning and calls, follows `text_grammar`, or
    is free if that is None. `number` maps the token ids of marks to ids in the grammar. Raises
    InvalidGrammarError if a schema in the rules cannot be parsed."""
    has_text_grammar = text_grammar is not None
    if rules.messages is not None:
        grammar = write_message_grammar(rules, rules.messages, has_text_grammar, number)
    else:
        grammar = _AnswerGrammar(rules, has_text_grammar, number).write()
    if text_grammar is None:
        return grammar
    parts = {"answer": grammar, "text": text_grammar}
    return json.dumps({"grammars": [{"name": name, "lark_grammar": part} for name, part in parts.items()]})


class _AnswerGrammar:
    """Writer of the grammar's lines."""

    def __init__(self, rules: AnswerRules, has_text_grammar: bool, number: Callable[[int], int]) -> None:
        self._rules = rules
        self._has_text_grammar = has_text_grammar
        self._number = number
        self._blanks = "BLANKS?" if rules.reasoning else ""
        self._lines: list[str] = []
        self._texts: dict[str, int] = {}  # numbers of the rules of texts with patterns

    def write(self) -> str:
        reasoning = self._rules.reasoning
        calls = self._rules.calls
        before = self._reasoning(reasoning) if reasoning else ""
        if calls is not None:
            self._calls(calls)
        after = self._text_or_calls(calls) if calls else self._text()
        return "\n".join([f"{HEADER}start: {before} ({after})", r"BLANKS: /[ \t\r\n]{1,8}/", *self._lines])

    def _reasoning(self, rule: ReasoningRule) -> str:
        self._lines.append(f"thinking: {self._thinking(rule)}")
        if rule.begin is None:
            return "thinking"
        if rule.begin.token_id is None:
            self._lines.append(f"BEGIN: /{BLANKS}{_quote(rule.begin.text)}/")
            return "(BEGIN thinking)?"
        return f"(BLANKS? {self._token(rule.begin.token_id)} thinking)?"

    def _thinking(self, rule: ReasoningRule) -> str:
        """Return the rule body for reasoning with its end mark."""
        if rule.end.token_id is None:
            assert rule.max_tokens is None, "only a token can be forced"
            self._lines.append(f"thoughts[lazy]: /{ANYTHING}{_quote(rule.end.text)}/")
            return "thoughts"
        end = self._token(rule.end.token_id)
        if rule.max_tokens == 0:
            return end
        self._lines.append(f"thoughts{_limit(rule)}: THOUGHTS")
        self._lines.append(f"THOUGHTS: {_any_but(_containing(rule.end.text))}")
        return f"thoughts {end}"

    def _calls(self, rules: CallRules) -> None:
        """Write the rules `calls`, and `rest` for everything after the first trigger."""
        trigger = self._mark(rules.trigger) if rules.trigger else ""
        begin, between, end = (
            self._sequence(text, rules) for text in (rules.begin, rules.between, rules.end)
        )
        again = f"{between} {trigger} {begin}" if rules.begins_each else between
        more = f"({again} call)*" if rules.allows_several else ""
        optional = f"({self._blank_mark(rules.optional_mark)})?" if rules.optional_mark else ""
        numbers = range(len(rules.functions))
        first = "call"
        if rules.trigger is None and rules.begin:
            begin = ""
            first = "first"
            self._lines.append(f"first: {' | '.join(f'first_{i}' for i in numbers)}")
        self._lines.append(f"calls: {optional} {trigger} rest")
        self._lines.append(f"rest: {begin} {first} {more} {end}")
        self._lines.append(f"call: {' | '.join(f'call_{i}' for i in numbers)}")
        for i, function in enumerate(rules.functions):
            body = f"{self._arguments(i, function, rules)} {self._sequence(function.tail, rules)}"
            if first == "first":
                lead = self._head(f"FIRST_{i}", rules.begin + function.head, rules)
                self._lines += [f"first_{i}: {lead} body_{i}", f"body_{i}: {body}"]
                body = f"body_{i}"
            self._lines.append(f"call_{i}: {self._head(f'HEAD_{i}', function.head, rules)} {body}")

    def _arguments(self, index: int, function: CallRule, rules: CallRules) -> str:
        if function.tags is not None:
            return self._tagged(function, function.tags, rules)
        if function.notation is None:
            return f"%json {read_schema(function.schema, function.is_strict)}"
        text, quote_literal = None, None
        if mark := function.notation.quote:
            quote = self._sequence(mark, rules)
            text = f"{quote} {self._text_before(mark, rules)}"

            def quote_literal(value: str) -> str:
                return f"{quote} {json.dumps(value, ensure_ascii=False) if value else ''} {quote}"

        writer = NotationWriter(
            function.notation, f"arguments_{index}", function.is_strict, self._add_line, text, quote_literal
        )
        return writer.arguments(function.schema)

    def _add_line(self, line: str) -> None:
        if line not in self._lines:
            self._lines.append(line)

    def _tagged(self, function: CallRule, tags: Tags, rules: CallRules) -> str:
        """Return the grammar of arguments between tags, in the order of the schema."""
        if allows_any(function.schema):
            return f"({self._any_tagged(tags, rules)})*"
        parts = []
        for parameter in read_parameters(function.schema):
            if any(end.strip() in parameter.name for end in (tags.key_end, tags.text_key_end)):
                raise InvalidGrammarError(UNWRITABLE_NAME)
            key_end = tags.text_key_end if parameter.is_text else tags.key_end
            begin = self._sequence(tags.key_begin + parameter.name + key_end + tags.value_begin, rules)
            value = self._tagged_value(function, parameter, tags, rules)
            parts.append(f"({begin} {value}){'' if parameter.is_required else '?'}")
        return " ".join(parts)

    def _any_tagged(self, tags: Tags, rules: CallRules) -> str:
        """Return the grammar of any argument."""
        self._add_line(_KEY)
        begin = f"{self._sequence(tags.key_begin, rules)} KEY"
        before_text = self._sequence(tags.text_key_end + tags.value_begin, rules)
        grammar = f"{begin} {before_text} {self._tagged_text(tags, rules)}"
        if tags.text_key_end == tags.key_end:
            return grammar
        before_value = self._sequence(tags.key_end + tags.value_begin, rules)
        return f"{grammar} | {begin} {before_value} %json {{}} {self._sequence(tags.value_end, rules)}"

    def _tagged_value(
        self, function: CallRule, parameter: FunctionParameter, tags: Tags, rules: CallRules
    ) -> str:
        """Return the grammar of a value and its end."""
        end = self._sequence(tags.value_end, rules)
        if parameter.choices:
            return f"({' | '.join(map(json.dumps, parameter.choices))}) {end}"
        if parameter.is_text:
            patterns = read_text_patterns(parameter.schema, function.is_strict)
            return self._tagged_text(tags, rules, patterns)
        return f"%json {read_schema(parameter.schema, function.is_strict)} {end}"

    def _tagged_text(self, tags: Tags, rules: CallRules, patterns: Sequence[str] = ()) -> str:
        """Return the grammar of a text up to and including its end. The text matches all patterns."""
        end = tags.value_end.strip()
        before, _, after = tags.value_end.partition(end)
        patterns = [pattern + _quote(before) for pattern in patterns]
        return f"{self._text_before(end, rules, patterns)} {self._sequence(after, rules)}"

    def _text_before(self, end: str, rules: CallRules, patterns: Sequence[str] = ()) -> str:
        """Return the grammar of a text up to and including its end. The text matches all patterns."""
        mark = next((mark for mark in rules.marks if mark.text == end), None)
        if mark is None and not patterns:
            self._add_line(f"tagged[lazy]: /{ANYTHING}{_quote(end)}/")
            return "tagged"
        if mark is None:
            whole = " & ".join(f"/{pattern}{_quote(end)}/" for pattern in patterns)
            goes_on = f"{ANYTHING}{_quote(end)}(?s:.+)"
            return self._add_named("tagged", f"[lazy]: {whole} & {_not(goes_on)}")
        if not patterns:
            self._add_line(f"TAGGED: {_any_but(_containing(end))}")
            return f"TAGGED? {self._mark(mark)}"
        whole = " & ".join(f"/{pattern}/" for pattern in patterns)
        name = self._add_named("TAGGED", f": {whole} & {_any_but(_containing(end))}")
        return f"{name}{'?' if matches_nothing(patterns) else ''} {self._mark(mark)}"

    def _add_named(self, kind: str, body: str) -> str:
        """Write a rule or terminal, unless there is an equal one, and return its name."""
        name = f"{kind}_{self._texts.setdefault(body, len(self._texts))}"
        self._add_line(name + body)
        return name

    def _head(self, name: str, head: str, rules: CallRules) -> str:
        """Return the beginning of a call. Without a mark before it, it may contain white space like any text
        that a parser recognizes as a call, because texts exclude all such beginnings."""
        if rules.trigger is not None:
            return self._sequence(head, rules)
        if self._has_text_grammar:
            # A single long literal would take precedence over the JSON tokens of the text's own grammar.
            return " BLANKS? ".join(json.dumps(part) for part in _HEAD_PART.findall(head)) + " BLANKS?"
        self._lines.append(f"{name}: /{_blank_head(head)}/")
        return name

    def _text_or_calls(self, rules: CallRules) -> str:
        if rules.is_required:
            return f"{self._blanks} calls"
        if self._has_text_grammar:
            return f"{self._blanks} (@text | calls)"
        text = self._free_text()
        if rules.trigger is None:
            return f"{text} | calls"
        if rules.trigger.token_id is not None:
            return f"{text} ({self._token(rules.trigger.token_id)} rest)?"
        begins = f"/{ANYTHING}{_quote(rules.trigger.text)}/"
        self._lines.append(f"before_calls[lazy]: {' & '.join([begins, *map(_not, self._no_begins())])}")
        return f"{text} | before_calls rest"

    def _text(self) -> str:
        return f"{self._blanks} @text" if self._has_text_grammar else self._free_text()

    def _free_text(self) -> str:
        """Write and return a text rule that matches nothing that begins another part."""
        calls = self._rules.calls
        trigger = [_containing(calls.trigger.text)] if calls and calls.trigger else []
        self._lines.append(f"TEXT: {_any_but(*self._no_begins(), *trigger)}")
        return "TEXT"

    def _no_begins(self) -> Iterator[str]:
        """Yield patterns of answers whose beginning shows that they are not plain text."""
        reasoning = self._rules.reasoning
        calls = self._rules.calls
        if reasoning and reasoning.begin:
            yield f"{BLANKS}{_quote(reasoning.begin.text)}{ANYTHING}"
        if calls and calls.trigger is None:
            heads = [_blank_head(calls.begin + function.head) for function in calls.functions]
            # Parsers accept the keys in any order.
            keys = {key for function in calls.functions for key in _LAST_KEY.findall(function.head)}
            heads += [_blank_head("{" + key + ":") for key in sorted(keys)]
            heads += [f"{BLANKS}{_quote(calls.optional_mark.text)}"] if calls.optional_mark else []
            yield f"({'|'.join(heads)}){ANYTHING}"

    def _sequence(self, text: str, rules: CallRules) -> str:
        """Return the grammar of a literal text. Marks in it that are tokens match as tokens."""
        marks = {mark.text: mark for mark in rules.marks}
        if not marks:
            return json.dumps(text) if text else ""
        longest_first = sorted(marks, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
        return " ".join(self._mark(marks.get(part, Mark(part))) for part in parts if part)

    def _mark(self, mark: Mark) -> str:
        return json.dumps(mark.text) if mark.token_id is None else self._token(mark.token_id)

    def _blank_mark(self, mark: Mark) -> str:
        """Return the grammar of a mark that may follow white space at the beginning of an answer."""
        if mark.token_id is not None:
            return f"BLANKS? {self._token(mark.token_id)}"
        return f"/{BLANKS}{_quote(mark.text)}/"

    def _token(self, token_id: int) -> str:
        return f"<[{self._number(token_id)}]>"


def _limit(rule: ReasoningRule) -> str:
    if rule.max_tokens is None:
        return ""
    # After a token that texts also match, the library does not count the first token if it has one byte.
    is_late = rule.begin is not None and not rule.begin.is_special
    return f"[max_tokens={max(rule.max_tokens - is_late, 1)}]"


def _blank_head(head: str) -> str:
    """Return a pattern of the head that allows white space around all parts of its JSON."""
    return "".join(f"{BLANKS}{_quote(part)}" for part in _HEAD_PART.findall(head)) + BLANKS


def _any_but(*patterns: str) -> str:
    return " & ".join([f"/{ANYTHING}/", *map(_not, patterns)])


def _not(pattern: str) -> str:
    return f"~/{pattern}/"


def _containing(text: str) -> str:
    return f"{ANYTHING}{_quote(text)}{ANYTHING}"


def _quote(text: str) -> str:
    """Return a pattern, for use between slashes in a grammar, that matches exactly the text."""
    quoted = _SPECIAL_CHARACTERS.sub(r"\\\g<0>", text)
    return quoted.replace("\n", r"\n").replace("\r", r"\r").replace("\t", r"\t")
