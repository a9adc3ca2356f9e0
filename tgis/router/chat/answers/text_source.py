"""Reads a text that comes in parts. What it reads does not depend on how the text is split."""

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

from tgis.router.chat.answers.json_scanner import BEGINS, JsonScanner
from tgis.router.chat.formats.types import Parts

T = TypeVar("T")
Wait = Generator[None, None, T]
"""Reader that returns T. It yields until more of the text, or its end, has come."""

SPACE = " \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*+")
_ID = re.compile(r"[A-Za-z0-9_-]*+")


class TextSource:
    """Text of an answer. Methods that return `Wait` hold what they read."""

    def __init__(self) -> None:
        self.held: list[str] = []
        """Text that was read, and that is content if no call follows."""
        self.is_ended = False
        self._text, self._position = "", 0

    def feed(self, text: str) -> None:
        self._text, self._position = self._text[self._position :] + text, 0

    def take_all(self) -> str:
        return self._take(len(self._text))

    def take_before(self, mark: str) -> str:
        """Return the text before the mark, or before what may be its begin."""
        index = self._text.find(mark[0], self._position)
        if index >= 0:
            index = self._text.find(mark, index)
            index = self._find_begin(mark) if index < 0 else index
        return self.take_all() if index < 0 else self._take(index)

    def has_next(self, part: str) -> bool:
        """Return True, and hold the part, if it comes next. To be called when enough text has come."""
        if not self._text.startswith(part, self._position):
            return False
        self._hold(self._position + len(part))
        return True

    def has(self, part: str) -> Wait[bool]:
        while self._is_short_of(part):
            yield
        return self.has_next(part)

    def has_all(self, parts: Parts, may_be_cut: bool = False) -> Wait[bool]:
        """Return True if the parts follow, with any white space before each; with `may_be_cut` also if the
        text ends within them."""
        for part in parts:
            yield from self.skip_space()
            if not (yield from self.has(part.strip(SPACE))):
                return may_be_cut and self._ends_within(part.strip(SPACE))
        return True

    def has_any(self, texts: tuple[str, ...]) -> Wait[str | None]:
        """Return the longest of the texts that comes next."""
        while any(self._is_short_of(text) for text in texts):
            yield
        found = [text for text in texts if self._text.startswith(text, self._position)]
        longest = max(found, key=len, default=None)
        self._hold(self._position + len(longest or ""))
        return longest

    def skip_space(self) -> Wait[None]:
        yield from self._skip(_SPACES)

    def skip_id(self) -> Wait[None]:
        yield from self._skip(_ID)

    def begins_value(self) -> Wait[str]:
        """Return the first character of the JSON value that comes next; nothing if none comes."""
        while self._position == len(self._text) and not self.is_ended:
            yield
        first = self._text[self._position : self._position + 1]
        return first if first in BEGINS else ""

    def value(self, sink: Callable[[str], None]) -> Wait[bool]:
        """Give the JSON value that comes next to `sink`, as it comes. Return True if it is whole."""
        scanner = JsonScanner()
        while True:
            end = scanner.scan(self._text, self._position)
            if end > self._position:
                sink(self._take(end))
            if scanner.is_done or self.is_ended:
                return scanner.is_done
            yield

    def string(self) -> Wait[str | None]:
        """Return the JSON string that comes next; None if there is none, or it is not valid."""
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
            found = pattern.match(self._text, self._position)
            assert found is not None, "the pattern matches the empty text"
            self._hold(found.end())
            if self._position < len(self._text) or self.is_ended:
                return
            yield

    def _is_short_of(self, part: str) -> bool:
        """Return True if the text that has come is a begin of the part."""
        length = len(self._text) - self._position
        return not self.is_ended and length < len(part) and part.startswith(self._text[self._position :])

    def _ends_within(self, part: str) -> bool:
        """Return True, and hold the rest of the text, if it ends with a begin of the part."""
        if not self.is_ended or not part.startswith(self._text[self._position :]):
            return False
        self._hold(len(self._text))
        return True

    def _find_begin(self, mark: str) -> int:
        """Return where the text that has come ends with a begin of the mark, or its end."""
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
