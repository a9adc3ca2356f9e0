"""Logging to stderr, as text or as JSON lines. No text of an argument or a field can look like a record or
a field of its own: both forms read back exactly."""

import functools
import json
import logging
import math
import re
import sys
import time

FIELDS = "fields"
"""The key of `extra` under which a record brings its fields: `extra={FIELDS: {"request_id": "a1"}}`."""

Scalar = str | int | float | bool | None

_WORD = re.compile(r"[A-Za-z0-9<][A-Za-z0-9_.:/<>-]*", re.ASCII)
_READS_AS_NUMBER = re.compile(r"\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_CONSTANTS = frozenset(("true", "false", "null"))


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO tgis.router.app: message key=value other="a value"`.

    A message or string value that could be misread is a JSON string; so is none that could not."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_timestamp(record)} {record.levelname} {record.name}: {_text_message(record.getMessage())}"
        fields = [f" {_key(name)}={_text_value(value)}" for name, value in _fields(record).items()]
        lines = [head + "".join(fields)]
        if record.exc_info:  # indented, because a traceback ends with a text that may be a user's
            traceback = self.formatException(record.exc_info)
            lines += ["    " + _printable(line) for line in traceback.splitlines()]
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """The same as an object. A field of a name that every record has gets an underscore behind it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Scalar] = {
            "timestamp": _timestamp(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        for name, value in _fields(record).items():
            line[f"{name}_" if name in line else name] = value
        return json.dumps(line, ensure_ascii=True, allow_nan=False)


def setup(level: str, json_output: bool) -> None:
    """Replaces the root logger's handlers; called once by each process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if json_output else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # what it has to say, we say ourselves


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _fields(record: logging.LogRecord) -> dict[str, Scalar]:
    """What the record brought, with values that JSON has; anything else becomes its text."""
    fields = getattr(record, FIELDS, None)
    if not isinstance(fields, dict):  # another library's attribute of this name is not ours to print
        return {}
    return {str(name): _scalar(value) for name, value in fields.items()}


def _scalar(value: object) -> Scalar:
    if value is None or type(value) in (str, int, bool):
        return value  # type: ignore[return-value]
    if type(value) is float and math.isfinite(value):
        return value
    return str(value)


def _text_message(message: str) -> str:
    """As it is where the first `=` of the line is then still the first field's, else as a JSON string."""
    is_clear = message.isprintable() and not message.startswith('"')
    return message if is_clear and "=" not in message else _quoted(message)


def _text_value(value: Scalar) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    is_word = _WORD.fullmatch(value) and value not in _CONSTANTS and not _READS_AS_NUMBER.fullmatch(value)
    return value if is_word else _quoted(value)


@functools.lru_cache(maxsize=256)
def _key(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]", "_", name)


def _quoted(text: str) -> str:
    """A JSON string in which printable characters of every script stay readable."""
    return '"' + "".join(c if _is_plain(c) else json.dumps(c)[1:-1] for c in text) + '"'


def _is_plain(character: str) -> bool:
    return character.isprintable() and character not in '"\\'


def _printable(text: str) -> str:
    """Control characters escaped, so that the text stays on its line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
