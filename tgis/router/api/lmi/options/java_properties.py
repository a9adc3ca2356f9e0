"""Reads Java's properties files, such as serving.properties, by the rules of java.util.Properties."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tgis.errors import OperatorError

BLANKS = " \t\f"
_LINE_ENDS = re.compile(r"\r\n|\r|\n")
_ENTRY = re.compile(r"((?:[^\\=: \t\f]|\\.)*)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u(.{0,4})|(.))", re.DOTALL)
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_LETTERS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


class PropertiesError(OperatorError):
    """Error in the syntax or the encoding of a properties file."""


@dataclass(frozen=True)
class Property:
    key: str
    value: str
    line: int
    """Number of the entry's first line."""


def parse_properties(data: bytes) -> list[Property]:
    """Return the entries of a UTF-8 file, the last entry for each key. Raises PropertiesError."""
    entries = {}
    for number, line in _logical_lines(_decode(data)):
        match = _ENTRY.fullmatch(line)
        assert match, "every text is an entry"
        key, value = (_unescape(part, number) for part in match.groups())
        if "\0" in key + value:
            raise PropertiesError(f"line {number}: U+0000 is not allowed")
        entries[key] = Property(key, value, number)
    return list(entries.values())


def _decode(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        number = len(_LINE_ENDS.findall(data[: error.start].decode())) + 1
        raise PropertiesError(f"line {number} is not UTF-8") from error


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each entry's first line number and its text, with continued lines joined."""
    first = 0
    joined = ""
    for number, line in enumerate(_LINE_ENDS.split(text), 1):
        line = line.lstrip(BLANKS)
        if not joined and (not line or line[0] in "#!"):
            continue
        first = first if joined else number
        is_continued = (len(line) - len(line.rstrip("\\"))) % 2 == 1
        joined += line[:-1] if is_continued else line
        if not is_continued:
            yield first, joined
            joined = ""
    if joined:
        yield first, joined


def _unescape(text: str, number: int) -> str:
    def replace(match: re.Match[str]) -> str:
        digits, letter = match.groups()
        if digits is None:
            return _LETTERS.get(letter, letter)
        if not _HEX.fullmatch(digits):
            raise PropertiesError(f"line {number}: \\u must be followed by four hexadecimal digits")
        return chr(int(digits, 16))

    try:
        # Java writes a character above U+FFFF as two escapes, a surrogate pair.
        return _ESCAPE.sub(replace, text).encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise PropertiesError(f"line {number}: an escape \\u is half of a surrogate pair") from error
