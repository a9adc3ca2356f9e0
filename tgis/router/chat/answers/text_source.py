"""Reads a text that arrives in pieces. The result does not depend on how the text is split."""

import json
import re
from collections.abc import Callable, Generator
from typing import Protocol, TypeVar

from tgis.router.chat.answers.json_scanner import BEGINS, JsonScanner
from tgis.router.chat.formats.types import Parts

T = TypeVar("T")
Wait = Generator[None, None, T]
"""Generator that returns T. It yields when it needs more text or the end of the text."""

SPACE = " \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*+")
_ID = re.compile(r"[A-Za-z0-9_-]*+")


class Scanner(Protocol):
    is_done: bool
    """True once the value has ended."""

    def scan(self, text: str, start: int) -> int:
        """Return the end of the value, or of its part in `text`, from `start` on."""


class TextSource:
    """Text of an answer. Methods that return `Wait` hold the text that they read."""

    def __init__(self) -> None:
        self.held: list[str] = []
        """Text that was read and becomes content if no call follows."""
        self.is_ended = False
        self._text = ""
        self._position = 0

    def feed(self, text: str) -> None:
        self._text = self._text[self._position :] + text
        self._position = 0

    def take_all(self) -> str:
        return self._take(len(self._text))

    def take_before(self, mark: str) -> str:
        """Return the text before the mark, or before a possible beginning of it."""
        index = self._text.find(mark[0], self._position)
        if index >= 0:
            index = self._text.find(mark, index)
            index = self._find_begin(mark) if index < 0 else index
        return self.take_all() if index < 0 else self._take(index)

    def has_next(self, part: str) -> bool:
        """Hold the part and return True if it comes next. Call this only when enough text has arrived."""
        if not self._text.startswith(part, self._position):
            return False
        self._hold(self._position + len(part))
        return True

    def has(self, part: str) -> Wait[bool]:
        while self._is_short_of(part):
            yield
        return self.has_next(part)

    def is_before(self, part: str) -> Wait[bool]:
        """Return True if the part comes next, without reading it."""
        while self._is_short_of(part):
            yield
        return self._text.startswith(part, self._position)

    def has_all(self, parts: Parts, may_be_cut: bool = False) -> Wait[bool]:
        """Return True if the parts come next, with any white space before each. With `may_be_cut`, also
        return True if the text ends within them."""
        for part in parts:
            yield from self.skip_space()
            if not (yield from self.has(part.strip(SPACE))):
                return may_be_cut and self._ends_within(part.strip(SPACE))
        return True

    def has_any(self, texts: tuple[str, ...]) -> Wait[str | None]:
        """Return the longest of the texts that comes next, or None."""
        while any(self._is_short_of(text) for text in texts):
            yield
        matches = [text for text in texts if self._text.startswith(text, self._position)]
        longest = max(matches, key=len, default=None)
        self._hold(self._position + len(longest or ""))
        return longest

    def skip_space(self) -> Wait[None]:
        yield from self._skip(_SPACES)

    def skip_id(self) -> Wait[None]:
        yield from self._skip(_ID)

    def begins_value(self) -> Wait[str]:
        """Return the first character of the JSON value that comes next, or an empty string."""
        first = yield from self.next_character()
        return first if first in BEGINS else ""

    def next_character(self) -> Wait[str]:
        """Return the character that comes next; empty at the end."""
        while self._position == len(self._text) and not self.is_ended:
            yield
        return self._text[self._position : self._position + 1]

    def begins_json(self) -> Wait[bool]:
        """Return True if the object that comes next is empty or begins with a key in quotes."""
        while not (rest := self._text[self._position + 1 :].lstrip(SPACE)) and not self.is_ended:
            yield
        return rest[:1] in ('"', "}")

    def text_before(self, mark: str) -> Wait[str]:
        """Return the text before the mark or, without one, before the end of the text."""
        parts: list[str] = []
        while True:
            parts.append(self.take_before(mark))
            if self._text.startswith(mark, self._position) or self.is_ended:
                return "".join(parts)
            yield

    def value(self, sink: Callable[[str], None], scanner: Scanner | None = None) -> Wait[bool]:
        """Pass the value that comes next, of JSON or a scanner's kind, to `sink`, piece by piece. Return True
        if it is complete."""
        scanner = scanner or JsonScanner()
        while True:
            end = scanner.scan(self._text, self._position)
            if end > self._position:
                sink(self._take(end))
            if scanner.is_done or self.is_ended:
                return scanner.is_done
            yield

    def string(self) -> Wait[str | None]:
        """Return the JSON string that comes next, or None if there is no valid one."""
        if (yield from self.begins_value()) != '"':
            return None
        parts: list[str] = []
        yield from self.value(parts.append)
        self.held += parts
        try:
            return str(json.loads("".join(parts)))
        except ValueError:
            return None

    def _skip(self, pattern: re.Pattern[str]) -> Wait[None]:
        while True:
            match = pattern.match(self._text, self._position)
            assert match is not None, "the pattern matches the empty text"
            self._hold(match.end())
            if self._position < len(self._text) or self.is_ended:
                return
            yield

    def _is_short_of(self, part: str) -> bool:
        """Return True if the unread text is a proper prefix of the part."""
        length = len(self._text) - self._position
        return not self.is_ended and length < len(part) and part.startswith(self._text[self._position :])

    def _ends_within(self, part: str) -> bool:
        """Hold the rest of the text and return True if the text ends with it and it is a prefix of the
        part."""
        if not self.is_ended or not part.startswith(self._text[self._position :]):
            return False
        self._hold(len(self._text))
        return True

    def _find_begin(self, mark: str) -> int:
        """Return the start of a prefix of the mark at the end of the text, or the end of the text."""
        length = len(self._text)
        if self.is_ended:
            return length
        start = max(self._position, length - len(mark) + 1)
        while (start := self._text.find(mark[0], start)) >= 0:
            if mark.startswith(self._text[start:]):
                return start
            start += 1
        return length

    def _hold(self, end: int) -> None:
        if end > self._position:
            self.held.append(self._take(end))

    def _take(self, end: int) -> str:
        text = self._text[self._position : end]
        self._position = end
        return text
