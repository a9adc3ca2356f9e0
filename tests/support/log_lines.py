"""Strict parser of log lines, and texts that try to forge them."""

import json
import re

from tgis.logs import Scalar

HOSTILE = "harmless\n2026-01-01T00:00:00.000Z ERROR root: forged \x1b[31m\x00"
HOSTILE_TEXTS = [
    HOSTILE,
    "a request_id=forged",
    'a" request_id="forged',
    '"a" request_id="forged"',
    'x\\" level=ERROR',
    "ends with \\",
    '", "level": "ERROR", "x": "',
    "line\u2028separator\u2029paragraph\x85next\x0bline\x0cfeed\rreturn",
    "\u202eright to left\u202c \u2066isolate\u2069 \u200fmark \u200bzero width \ufeffbom",
    "\ud800 lone surrogate",
    "\U000e0041 tag, \U0001f642 smile, 東京 é",
    "del \x7f c1 \x9b31m nbsp \xa0",
    "",
    " ",
    "true",
    "null",
    "12",
    "1e5",
    "-1",
    "0a1b",
    "NaN",
    "<none>",
    "=",
]
HEAD = re.compile(r"(\S+Z) ([A-Z]+) (\S+): ")


def read_value(text: str) -> tuple[Scalar, str]:
    """Parse a JSON string, or a JSON value or bare word without spaces. Return it and the rest of the
    text."""
    if text.startswith('"'):
        value, end = json.JSONDecoder().raw_decode(text)
        return value, text[end:]
    run, space, rest = text.partition(" ")
    try:
        return json.loads(run, parse_constant=str), space + rest
    except ValueError:
        assert re.fullmatch(r"[\w.:/<>-]+", run, re.ASCII)
        return run, space + rest


def parse(line: str, about: tuple[str, str] = ("INFO", "tgis.test")) -> tuple[str, dict[str, Scalar]]:
    """Parse a text line strictly: a message, as JSON or without `=`, followed by ` key=value` pairs up to the
    end. `about` has its level and logger."""
    assert line.isprintable()
    head = HEAD.match(line)
    assert head is not None
    assert head.group(2, 3) == about
    rest = line[head.end() :]
    if rest.startswith('"'):
        message, rest = read_value(rest)
    else:
        message, rest = re.fullmatch(r"([^=]*?)((?: \w+=.*)?)", rest).groups()  # type: ignore[union-attr]
    fields: dict[str, Scalar] = {}
    while rest:
        key, rest = re.fullmatch(r" (\w+)=(.*)", rest).groups()  # type: ignore[union-attr]
        assert key not in fields
        fields[key], rest = read_value(rest)
    return str(message), fields
