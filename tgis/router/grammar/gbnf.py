"""Converts GBNF, the notation of llama.cpp's grammars, to Lark.

GBNF describes texts character by character. So does the result: each of its lexemes is a single character.
With longer lexemes, the grammar library's lexer would take the longest match and reject texts that the
grammar allows: `root ::= [a-z]+ "b"` could never end."""

import re
from collections.abc import Callable
from typing import NoReturn

from tgis.router.grammar.errors import InvalidGrammarError

RULE = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")
MAX_REPETITIONS = 2000  # llama.cpp's own limit
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BLANKS = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANKS_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NEWLINE = re.compile(r"\r\n|\n|\r|\Z")
_REPETITION = re.compile(r"([*+?])|\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{char: char for char in '\\"[]'}}
_LAST = chr(0x10FFFF)
_BOUNDS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def is_gbnf(text: str) -> bool:
    """Return True for GBNF, whose rules contain `::=`. An empty text is GBNF without rules."""
    return RULE.search(text) is not None or not text.strip()


def gbnf_to_lark(text: str) -> str:
    """Convert a GBNF grammar to Lark. Raises InvalidGrammarError and RecursionError."""
    return _Parser(text).convert()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._numbers: dict[str, int] = {}
        """Rule numbers by name, in order of first occurrence."""
        self._rules: dict[int, str] = {}

    def convert(self) -> str:
        self._skip(_BLANKS_AND_LINES)
        while self._at < len(self._text):
            self._rule()
            self._skip(_BLANKS_AND_LINES)
        for name, number in self._numbers.items():
            if number not in self._rules:
                raise InvalidGrammarError(f"Rule '{name[:80]}' not found", quotes=True)
        if "root" not in self._numbers:
            raise InvalidGrammarError("No 'root' rule found")
        lines = [f"start: r{self._numbers['root']}"]
        return "\n".join([*lines, *(f"r{number}: {body}" for number, body in self._rules.items())])

    def _rule(self) -> None:
        number = self._number(self._match(_NAME, "the name of a rule"))
        self._skip(_BLANKS)
        if not self._text.startswith("::=", self._at):
            self._fail("::=")
        if number in self._rules:
            self._fail("another name, because this rule exists already")
        self._at += 3
        self._skip(_BLANKS_AND_LINES)
        self._rules[number] = self._alternatives(_BLANKS)
        self._match(_NEWLINE, "the end of the line")

    def _alternatives(self, blanks: re.Pattern[str]) -> str:
        """Parse alternatives whose parts `blanks` may separate."""
        alternatives = [self._sequence(blanks)]
        while self._peek() == "|":
            self._at += 1
            self._skip(_BLANKS_AND_LINES)
            alternatives.append(self._sequence(blanks))
        return " | ".join(alternatives)

    def _sequence(self, blanks: re.Pattern[str]) -> str:
        items: list[str] = []
        while (read := self._reader()) is not None:
            item = read()
            self._skip(blanks)
            items.append(self._repeat(item, blanks))
        return " ".join(item for item in items if item) or '""'

    def _reader(self) -> Callable[[], str] | None:
        """Return the method that parses the next item of a sequence; None at its end."""
        match self._peek():
            case '"':
                return self._literal
            case "[":
                return self._char_class
            case "(":
                return self._group
            case ".":
                return self._any_char
            case char if _NAME.match(char):
                return self._reference
        return None

    def _literal(self) -> str:
        self._at += 1
        chars = []
        while self._peek() != '"':
            chars.append(self._char())
        self._at += 1
        return f"({' '.join(map(_one_of, chars))})" if chars else ""

    def _char_class(self) -> str:
        self._at += 1
        is_negated = self._peek() == "^"
        self._at += is_negated
        ranges = []
        while self._peek() != "]":
            first = last = self._char()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._char()
            if first > last:
                self._fail("a range that begins with its smaller character")
            ranges.append(f"{_in_class(first)}-{_in_class(last)}")
        self._at += 1
        if not ranges and not is_negated:
            self._fail("a character between [ and ]")
        return f"/[{'^' * is_negated}{''.join(ranges)}]/" if ranges else self._any()

    def _group(self) -> str:
        self._at += 1
        self._skip(_BLANKS_AND_LINES)
        inner = self._alternatives(_BLANKS_AND_LINES)
        if self._peek() != ")":
            self._fail(")")
        self._at += 1
        return f"({inner})"

    def _any_char(self) -> str:
        self._at += 1
        return self._any()

    def _any(self) -> str:
        return _one_of("\0", _LAST)

    def _reference(self) -> str:
        return f"r{self._number(self._match(_NAME, 'a name'))}"

    def _repeat(self, item: str, blanks: re.Pattern[str]) -> str:
        """Apply the repetitions that follow an item."""
        while self._peek() and self._peek() in "*+?{":
            match = _REPETITION.match(self._text, self._at)
            if match is None:
                self._fail("{m}, {m,} or {m,n}")
            minimum, maximum = _bounds(*match.groups())
            if max(minimum, maximum or 0) > MAX_REPETITIONS:
                self._fail(f"at most {MAX_REPETITIONS} repetitions")
            self._at = match.end()
            self._skip(blanks)
            item = _repeated(item, minimum, maximum)
        return item

    def _char(self) -> str:
        """Parse a character of a literal or a class."""
        char = self._peek()
        if not char:
            self._fail("the end of a literal or of [")
        self._at += 1
        if char != "\\":
            return char
        kind = self._peek()
        self._at += 1
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        digits = self._text[self._at : self._at + _HEX_DIGITS.get(kind, 0)]
        if not re.fullmatch(r"[0-9A-Fa-f]+", digits) or len(digits) != _HEX_DIGITS.get(kind):
            self._at -= 2
            self._fail(r"one of \t \r \n \\ \" \[ \] \xXX \uXXXX \UXXXXXXXX")
        self._at += len(digits)
        code = int(digits, 16)
        if code > ord(_LAST) or 0xD800 <= code < 0xE000:
            self._fail("the code of a character")
        return chr(code)

    def _number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, blanks: re.Pattern[str]) -> None:
        match = blanks.match(self._text, self._at)
        assert match is not None, "the pattern also matches nothing"
        self._at = match.end()

    def _match(self, pattern: re.Pattern[str], expected: str) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            self._fail(expected)
        self._at = match.end()
        return match[0]

    def _fail(self, expected: str) -> NoReturn:
        line = self._text.count("\n", 0, self._at) + 1
        column = self._at - self._text.rfind("\n", 0, self._at)
        raise InvalidGrammarError(f"expected {expected} at line {line}, column {column}")


def _bounds(sign: str | None, minimum: str, comma: str | None, maximum: str | None) -> tuple[int, int | None]:
    if sign:
        return _BOUNDS[sign]
    if comma and maximum is None:
        return int(minimum), None
    return int(minimum), int(maximum or minimum)


def _one_of(first: str, last: str | None = None) -> str:
    return f"/[{_in_class(first)}-{_in_class(last or first)}]/"


def _in_class(char: str) -> str:
    return rf"\u{{{ord(char):x}}}"


def _repeated(item: str, minimum: int, maximum: int | None) -> str:
    if not item or maximum == 0:
        return ""
    return f"({item}){{{minimum},{'' if maximum is None else maximum}}}"
