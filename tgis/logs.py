"""Configures logging to stderr, as text or JSON lines. Escaping keeps any text from imitating a record or
field."""

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

from tgis.log_limits import OMITTED, RecordLimits, format_traceback

FIELDS = "fields"
"""Key of `extra` for a record's fields: `extra={FIELDS: {"request_id": "a1"}}`."""

Scalar = str | int | float | bool | None

_WORD = re.compile(r"[A-Za-z0-9<][A-Za-z0-9_.:/<>-]*", re.ASCII)
_READS_AS_NUMBER = re.compile(r"\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_CONSTANTS = frozenset(("true", "false", "null"))


class TextFormatter(logging.Formatter):
    """Formatter of lines `2026-01-31T12:00:00.123Z INFO tgis.router.app: message key=value other="a value"`.

    A message or value is written as a JSON string only if it would otherwise be ambiguous."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"{timestamp(record.created)} {record.levelname} {record.name}"
        head = f"{prefix}: {_text_message(record.getMessage())}"
        fields = [f" {_key(name)}={_text_value(value)}" for name, value in _fields(record).items()]
        lines = [head + "".join(fields)]
        if record.exc_info:  # indented, because a traceback ends with text that a client may control
            traceback = format_traceback(record.exc_info)
            lines += ["    " + printable(line) for line in traceback.splitlines()]
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """Formatter of JSON lines. A field whose name is a standard key gets a trailing underscore."""

    def __init__(self, process: Mapping[str, Scalar] = MappingProxyType({})) -> None:
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
            line["traceback"] = format_traceback(record.exc_info)
        for name, value in _fields(record).items():
            line[f"{name}_" if name in line else name] = value
        for name, value in self._process.items():
            line.setdefault(name, value)
        return json.dumps(line, ensure_ascii=True, allow_nan=False)


class _JsonHandler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Report a record that could not be formatted as one JSON object, not as `logging`'s plain lines."""
        text = "a log record could not be written"
        failure = logging.LogRecord(record.name, logging.ERROR, "", 0, text, (), sys.exc_info())
        with contextlib.suppress(OSError, ValueError):  # the stream may be closed
            self.stream.write(self.format(failure) + self.terminator)
            self.flush()


def setup(level: str, json_output: bool, process: Mapping[str, Scalar] = MappingProxyType({})) -> None:
    """Replace the root logger's handlers. The fields in `process` are added to every JSON object."""
    handler = _JsonHandler(sys.stderr) if json_output else logging.StreamHandler(sys.stderr)
    handler.addFilter(RecordLimits(report=handler.handle))
    handler.setFormatter(JsonFormatter(process) if json_output else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # the service logs the same events itself


def catch_unlogged() -> None:
    """Log warnings and uncaught exceptions, which Python would otherwise print."""
    logging.captureWarnings(True)
    sys.excepthook = lambda kind, error, traceback: _log_uncaught(logging.CRITICAL, error, traceback)
    threading.excepthook = lambda args: _log_uncaught(logging.ERROR, args.exc_value, args.exc_traceback)
    sys.unraisablehook = lambda args: _log_uncaught(logging.ERROR, args.exc_value, args.exc_traceback)


def _log_uncaught(level: int, error: BaseException | None, traceback: TracebackType | None) -> None:
    if error is not None and not isinstance(error, SystemExit):  # a thread may end by SystemExit
        logging.log(level, "uncaught exception", exc_info=(type(error), error, traceback))


def process_fields(process: str, options: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return the fields that identify a process in its JSON lines: its kind, its node, and its rank or router
    worker number."""
    fields: dict[str, Scalar] = {"process": process}
    if options.get("nnodes", 1) > 1:
        fields["node"] = options["node_rank"]
    if "rank" in options:
        fields["rank"] = options["rank"]
    if process == "router" and options.get("engine_path"):
        fields["worker"] = options["worker"]
    return fields


def timestamp(seconds: float) -> str:
    """Format seconds since the epoch as UTC time with milliseconds."""
    day_and_time = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{day_and_time}.{int(seconds * 1000 % 1000):03d}Z"


def _fields(record: logging.LogRecord) -> dict[str, Scalar]:
    """Return the record's fields; values without a JSON type are converted to text."""
    fields = getattr(record, FIELDS, None)
    if not isinstance(fields, dict):  # another library may use an attribute of this name
        fields = {}
    if (num_omitted := getattr(record, OMITTED, 0)) > 0:
        fields = fields | {OMITTED: num_omitted}
    return {str(name): _scalar(value) for name, value in fields.items()}


def _scalar(value: object) -> Scalar:
    if value is None or type(value) in (str, int, bool):
        return value  # type: ignore[return-value]
    if type(value) is float and math.isfinite(value):
        return value
    return str(value)


def _text_message(message: str) -> str:
    """Return a printable message without `=` unchanged, and any other message as a JSON string."""
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
    """Format the text as a JSON string that keeps printable non-ASCII characters."""
    plain = (c if c.isprintable() and c not in '"\\' else json.dumps(c)[1:-1] for c in text)
    return f'"{"".join(plain)}"'


def printable(text: str) -> str:
    """Escape unprintable characters, so that the text stays on one line and cannot control the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
