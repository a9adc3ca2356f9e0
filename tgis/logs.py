"""Logging to stderr, as text or as JSON lines. No text of an argument or a field can look like a record or
a field of its own: both forms read back exactly."""

import contextlib
import functools
import json
import logging
import math
import re
import sys
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Any, TextIO

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
        about = f"{timestamp(record.created)} {record.levelname} {record.name}"
        head = f"{about}: {_text_message(record.getMessage())}"
        fields = [f" {_key(name)}={_text_value(value)}" for name, value in _fields(record).items()]
        lines = [head + "".join(fields)]
        if record.exc_info:  # indented, because a traceback ends with a text that may be a user's
            traceback = self.formatException(record.exc_info)
            lines += ["    " + _printable(line) for line in traceback.splitlines()]
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """The same as an object. A field of a name that every record has gets an underscore behind it."""

    def __init__(self, process: Mapping[str, Scalar] = MappingProxyType({})) -> None:
        """`process` are fields for every object; those of the record's own come first."""
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Scalar] = {
            "timestamp": timestamp(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        for name, value in _fields(record).items():
            line[f"{name}_" if name in line else name] = value
        for name, value in self._process.items():
            line.setdefault(name, value)
        return json.dumps(line, ensure_ascii=True, allow_nan=False)


class _JsonHandler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Write that a record could not be formatted, as one object instead of the lines of `logging`."""
        text = "a log record could not be written"
        failure = logging.LogRecord(record.name, logging.ERROR, "", 0, text, (), sys.exc_info())
        with contextlib.suppress(OSError, ValueError):  # the stream may be closed
            self.stream.write(self.format(failure) + self.terminator)
            self.flush()


def setup(level: str, json_output: bool, process: Mapping[str, Scalar] = MappingProxyType({})) -> None:
    """Replaces the root logger's handlers. `process` are fields for every JSON object."""
    handler = _JsonHandler(sys.stderr) if json_output else logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if json_output else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # what it has to say, we say ourselves


def catch_unlogged() -> None:
    """Log from now on what Python would print: warnings, and exceptions that nobody catches."""
    logging.captureWarnings(True)
    sys.excepthook = lambda kind, error, traceback: _log_uncaught(logging.CRITICAL, error, traceback)
    threading.excepthook = lambda args: _log_uncaught(logging.ERROR, args.exc_value, args.exc_traceback)
    sys.unraisablehook = lambda args: _log_uncaught(logging.ERROR, args.exc_value, args.exc_traceback)


def _log_uncaught(level: int, error: BaseException | None, traceback: TracebackType | None) -> None:
    if error is not None and not isinstance(error, SystemExit):  # by which a thread may end
        logging.log(level, "uncaught exception", exc_info=(type(error), error, traceback))


def process_fields(process: str, options: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return what the JSON lines of a process say of it: what it is, and with these options which one."""
    fields: dict[str, Scalar] = {"process": process}
    if options.get("nnodes", 1) > 1:
        fields["node"] = options["node_rank"]
    if "rank" in options:
        fields["rank"] = options["rank"]
    return fields


def timestamp(seconds: float) -> str:
    """Return a time since the epoch in UTC, to the millisecond."""
    day_and_time = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{day_and_time}.{int(seconds * 1000 % 1000):03d}Z"


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
