"""Compares the reader of Java's properties files with one that takes one character at a time."""

import random

import pytest

from tgis.router.api.lmi.options.java_properties import PropertiesError, parse_properties

BLANKS, ENDS = " \t\f", "\r\n"
LETTERS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def read(text: str) -> dict[str, str]:
    return {one.key: one.value for one in parse_properties(text.encode())}


class PlainReader:
    """Reader that follows the documentation of java.util.Properties."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def entries(self) -> dict[str, str]:
        properties = {}
        while self.begin():
            key = self.part(BLANKS + "=:")
            self.skip_blanks()
            if self.peek() in ("=", ":"):
                self.at += 1
                self.skip_blanks()
            properties[key] = self.part("")
        return properties

    def begin(self) -> bool:
        """Advance to the first character of the next entry."""
        while self.peek():
            self.skip_blanks()
            if self.peek() in ("#", "!"):
                while self.peek() and self.peek() not in ENDS:
                    self.at += 1
            elif self.peek() and self.peek() in ENDS:
                self.at += 1
            else:
                break
        return self.peek() != ""

    def part(self, ends: str) -> str:
        text = ""
        while (one := self.peek()) and one not in ENDS + ends:
            self.at += 1
            if one != "\\":
                text += one
            elif self.continues():
                pass
            elif self.peek() == "u":
                text += chr(int(self.text[self.at + 1 : self.at + 5], 16))
                self.at += 5
            elif self.peek():
                text += LETTERS.get(self.peek(), self.peek())
                self.at += 1
        return text.encode("utf-16", "surrogatepass").decode("utf-16")

    def continues(self) -> bool:
        """Advance over a line end and the blanks after it. Return False if there is no line end here."""
        end = "\r\n" if self.text.startswith("\r\n", self.at) else self.peek()
        if not end or end[0] not in ENDS:
            return False
        self.at += len(end)
        while self.peek() and self.peek() in BLANKS:
            self.at += 1
        return True

    def skip_blanks(self) -> None:
        while self.peek() and (self.peek() in BLANKS or (self.peek() == "\\" and self.is_before_end())):
            self.at += 1
            if self.text[self.at - 1] == "\\":
                self.continues()

    def is_before_end(self) -> bool:
        return self.at + 1 < len(self.text) and self.text[self.at + 1] in ENDS

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=b", {"a": "b"}),
        ("a = b", {"a": "b"}),
        ("a:b\na2 : b2", {"a": "b", "a2": "b2"}),
        ("a b c", {"a": "b c"}),
        ("\t a \t=\t b  ", {"a": "b  "}),
        ("a==b", {"a": "=b"}),
        ("a", {"a": ""}),
        ("=b", {"": "b"}),
        ("# c=d\n  ! e=f\n\n \na=#b", {"a": "#b"}),
        ("# c \\\na=b", {"a": "b"}),
        ("a=b\\\n   c\\\r\n\td\\\re", {"a": "bcde"}),
        ("a=b\\\\\nc=d", {"a": "b\\", "c": "d"}),
        ("a=b\\", {"a": "b"}),
        ("a\\=b\\ c\\:d=e", {"a=b c:d": "e"}),
        ("a=\\t\\n\\r\\f\\q\\\\", {"a": "\t\n\r\fq\\"}),
        ("a=\\u0041\\u00e9\\ud83d\\ude00", {"a": "Aé😀"}),
        ("a=é", {"a": "é"}),
        ("\\u0061=b\na=c", {"a": "c"}),
        ("a=1\nb=2\na=3", {"a": "3", "b": "2"}),
        ("a=b\r\nc=d\re=f", {"a": "b", "c": "d", "e": "f"}),
        ("a=x\\\n# no comment", {"a": "x# no comment"}),
        ("\\\n\na=b", {"a": "b"}),
    ],
)
def test_rules(text: str, expected: dict[str, str]) -> None:
    assert read(text) == expected
    assert PlainReader(text).entries() == expected


def test_random_texts() -> None:
    draw = random.Random(7)
    parts = [*"ab=:#! \t\f\n\r\\", "\r\n", "\\\n", "\\\r\n  ", "\\u0041", "key = value\n", "\\\\"]
    for _ in range(4000):
        text = "".join(draw.choices(parts, k=draw.randint(0, 12))) + "\n"
        assert read(text) == PlainReader(text).entries(), repr(text)


def test_lines_are_those_where_entries_begin() -> None:
    properties = parse_properties(b"# one\na=b\\\nc\n\n\nd=e\na=f\n")
    assert [(one.key, one.line) for one in properties] == [("a", 7), ("d", 6)]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a=b\nc=\\u12x4", "line 2: "),
        (b"a=\\u12", "line 1: "),
        (b"a=b\r\nc=d\ne=\xff", "line 3 "),
        (b"a=b\n\nc=\\ud83d", "line 3: "),
        (b"a=b\n\nc=d\0", "line 3: "),
        (b"a=b\nc=d\\\n\\u0000e=f", "line 2: "),
        (b"a=b\n\0c=d", "line 2: "),
    ],
)
def test_errors_name_the_line(data: bytes, text: str) -> None:
    with pytest.raises(PropertiesError) as caught:
        parse_properties(data)
    assert str(caught.value).startswith(text)
