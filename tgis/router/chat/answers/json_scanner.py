"""Finds the end of a JSON value in a text that arrives in pieces, with constant memory at any depth."""

import re

BEGINS = frozenset('{["-0123456789tfn')
"""First characters of values."""

_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_SCALAR = re.compile(r"[^,\]}\s]*+")


class JsonScanner:
    """Scanner of one value. It counts both kinds of brackets together and does not validate scalars."""

    def __init__(self) -> None:
        self.is_done = False
        """True once the value has ended. A number ends with the character that follows it."""
        self._has_begun = self._in_string = self._is_escaped = False
        self._depth = 0

    def scan(self, text: str, start: int) -> int:
        """Return the end of the value, or of its part in `text`, from `start` on."""
        position = start
        while position < len(text) and not self.is_done:
            if self._in_string:
                position = self._scan_string(text, position)
            elif self._depth or (not self._has_begun and text[position] in '"{['):
                position = self._scan_structure(text, position)
            else:
                position = self._scan_scalar(text, position)
            self._has_begun = True
        return position

    def _scan_structure(self, text: str, position: int) -> int:
        token = _STRUCTURE.search(text, position)
        if token is None:
            return len(text)
        match token[0]:
            case '"':
                self._in_string = True
            case "{" | "[":
                self._depth += 1
            case _:
                self._depth -= 1
                self.is_done = not self._depth
        return token.end()

    def _scan_string(self, text: str, position: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return position + 1
        match = _STRING.match(text, position)
        assert match is not None, "the pattern matches the empty text"
        end = match.end()
        if end == len(text):
            return end
        if text[end] == '"':
            self._in_string = False
            self.is_done = not self._depth
        else:  # a backslash is the last character
            self._is_escaped = True
        return end + 1

    def _scan_scalar(self, text: str, position: int) -> int:
        match = _SCALAR.match(text, position)
        assert match is not None, "the pattern matches the empty text"
        self.is_done = match.end() < len(text)
        return match.end()
