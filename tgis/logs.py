"""Logging to stderr, as text or as JSON lines; a record is always one line, whatever its arguments hold."""

import json
import logging
import sys
import time


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO tgis.router.app: message`."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{_timestamp(record)} {record.levelname} {record.name}: {_one_line(_message(self, record))}"


class JsonFormatter(logging.Formatter):
    """The same fields as an object."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "timestamp": _timestamp(record),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(self, record),
        }
        return json.dumps(fields, ensure_ascii=True)


def setup(level: str, json_output: bool) -> None:
    """Replaces the root logger's handlers; called once by each process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if json_output else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _message(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.exc_info:
        text += "\n" + formatter.formatException(record.exc_info)
    return text


def _one_line(text: str) -> str:
    """Control characters escaped, so that no user's text can look like a record of its own."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
