"""Finds the end of a call that is written like Python, and converts its arguments to JSON.

Values are literals: texts, numbers, lists, dictionaries with texts as keys, and the constants of Python and
JSON."""

import re
from typing import Any

from tgis.router.chat.answers.json_text import write_json

MAX_DEPTH = 64
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_STRUCTURE = re.compile(r"[\"'()\[\]{}]")
_REST = {quote: re.compile(rf"[^{quote}\\]*+(?:\\.[^{quote}\\]*+)*+", re.DOTALL) for quote in "\"'"}
_SPACES = re.compile(r"[ \t\r\n]*")
_KEYWORD = re.compile(r"[^\s=,()\[\]{}\"'][^=,()\[\]{}\"']*")
_NAME = re.compile(r"[^\W\d]\w*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![\w.])")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}


class ArgumentsScanner:
    """Scanner of the text after the opening parenthesis of a call, up to its end. It counts all kinds of
    brackets together."""

    def __init__(self) -> None:
        self.is_done = False
        self._quote = ""
        self._is_escaped = False
        self._depth = 1

    def scan(self, text: str, start: int) -> int:
        """Return the end of the call, or of its part in `text`, from `start` on."""
        position = start
        while position < len(text) and not self.is_done:
            if self._quote:
                position = self._scan_text(text, position)
            elif (match := _STRUCTURE.search(text, position)) is None:
                return len(text)
            else:
                self._take(match[0])
                position = match.end()
        return position

    def _take(self, character: str) -> None:
        if character in "\"'":
            self._quote = character
            return
        self._depth += 1 if character in "([{" else -1
        self.is_done = not self._depth

    def _scan_text(self, text: str, position: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return position + 1
        match = _REST[self._quote].match(text, position)
        assert match is not None, "the pattern matches the empty text"
        end = match.end()
        if end == len(text):
            return end
        if text[end] == "\\":
            self._is_escaped = True
        else:
            self._quote = ""
        return end + 1


def to_json(text: str) -> str | None:
    """Return the arguments, with the parenthesis after them, as a JSON object; None if they are malformed."""
    try:
        return _Arguments(text).read()
    except (ValueError, IndexError):
        return None


class _Arguments:
    """Parser of arguments. Methods raise ValueError and IndexError for malformed ones."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def read(self) -> str:
        members: dict[str, str] = {}
        while not self._has(")"):
            name = self._match(_KEYWORD).rstrip()
            if name in members or not self._has("="):
                raise ValueError("no argument")
            members[name] = self._value(0)
            self._end_item(")")
        if self._at < len(self._text):
            raise ValueError("text after the call")
        return _write_object(members)

    def _value(self, depth: int) -> str:
        """Parse a value, and return it as JSON."""
        self._skip_space()
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        match self._text[self._at]:
            case '"' | "'":
                return write_json(self._string())
            case "[":
                return self._list(depth)
            case "{":
                return self._dictionary(depth)
            case character if character.isalpha():
                return write_json(_constant(self._match(_NAME)))
        return self._match(_NUMBER)

    def _list(self, depth: int) -> str:
        self._at += 1
        items = []
        while not self._has("]"):
            items.append(self._value(depth + 1))
            self._end_item("]")
        return f"[{', '.join(items)}]"

    def _dictionary(self, depth: int) -> str:
        self._at += 1
        members: dict[str, str] = {}
        while not self._has("}"):
            self._skip_space()
            key = self._string()
            if not self._has(":"):
                raise ValueError("no value")
            members[key] = self._value(depth + 1)
            self._end_item("}")
        return _write_object(members)

    def _end_item(self, end: str) -> None:
        """Skip the comma after an item, which the last one need not have."""
        if not self._has(",") and not self._text.startswith(end, self._at):
            raise ValueError("no end of an item")

    def _string(self) -> str:
        quote = self._text[self._at]
        if quote not in _REST:
            raise ValueError("no text")
        begin = self._at + 1
        self._at = begin
        inner = self._match(_REST[quote])
        if self._text[self._at] != quote:
            raise ValueError("no end of a text")
        self._at += 1
        return _ESCAPE.sub(_unescape, inner)

    def _has(self, character: str) -> bool:
        """Skip white space, and the character if it comes next."""
        self._skip_space()
        if not self._text.startswith(character, self._at):
            return False
        self._at += 1
        return True

    def _skip_space(self) -> None:
        self._match(_SPACES)

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise ValueError("the value is malformed")
        self._at = match.end()
        return match[0]


def _constant(name: str) -> Any:
    if name not in _CONSTANTS:
        raise ValueError("no constant")
    return _CONSTANTS[name]


def _unescape(match: re.Match[str]) -> str:
    escape = match[1]
    if escape[0] in "xuU":
        return chr(int(escape[1:], 16)) if len(escape) > 1 else match[0]
    if escape[0] in "01234567":
        return chr(int(escape, 8))
    return _ESCAPED.get(escape, escape if escape in "\\'\"/" else match[0])


def _write_object(members: dict[str, str]) -> str:
    return f"{{{', '.join(f'{write_json(key)}: {value}' for key, value in members.items())}}}"
