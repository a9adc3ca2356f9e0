"""Logging to stderr, as text or as JSON lines. No argument's text can look like a record of its own."""

import json
import logging
import sys
import time


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO tgis.router.app: message`."""

    def format(self, record: logging.LogRecord) -> str:
        lines = [f"{_timestamp(record)} {record.levelname} {record.name}: {_printable(record.getMessage())}"]
        if record.exc_info:  # indented, because a traceback ends with a text that may be a user's
            traceback = self.formatException(record.exc_info)
            lines += ["    " + _printable(line) for line in traceback.splitlines()]
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """The same fields as an object."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "timestamp": _timestamp(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=True)


def setup(level: str, json_output: bool) -> None:
    """Replaces the root logger's handlers; called once by each process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if json_output else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # what it has to say, we say ourselves


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _printable(text: str) -> str:
    """Control characters escaped, so that the text stays on its line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
