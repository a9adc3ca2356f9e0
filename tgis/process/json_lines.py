"""Formats output lines of child processes, and the error line of a failed command, as JSON objects."""

import contextlib
import json
import re
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from tgis.logs import Scalar, timestamp

ERROR_PREFIX = "error: "  # prefix of the last line of a failed process, which has the reason
OUTPUT, LAST_LINE = "output", "tgis"  # logger names in such lines
DEFAULT_LEVEL = "WARNING"  # level of a line without one: libraries rarely print without a reason
FATAL_LEVEL = "CRITICAL"
MAX_ERROR_CHARS = 4096  # of a reason, which may quote a model's file; Kubernetes keeps as many
HEAD_CHARS = 200  # characters at the begin of a line that are searched for a level

_LETTERS = {"D": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": FATAL_LEVEL}
_NAMES = {"WARN": "WARNING", "FATAL": FATAL_LEVEL}
# Beginning of a line of glog, absl (gRPC) or c10 (torch): a letter, month and day.
_LETTER = re.compile(r"(?:\[rank\d+\]:)?\[?([DIWEF])\d{3,4} ")
_NAME = re.compile(r"\b(DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b")
_FAULT = re.compile(r"Traceback|terminate called|what\(\): |Fatal|[Ee]rror\b|Exception\b|Abort|Segmentation")


def to_json(line: str, fields: Mapping[str, Scalar], level: str | None = None) -> str:
    """Return the line as a JSON object with these fields. If it is one already, its own fields take
    precedence.

    Any other line becomes the message; its level is guessed from the text if `level` is None."""
    own = _read_object(line)
    if own is not None:
        # Lines with too large numbers or too deep nesting cannot be serialized; they become a message.
        with contextlib.suppress(ValueError, RecursionError):
            return json.dumps({**own, **fields, **own}, allow_nan=False)  # its own fields also come first
    return _write_record(line, fields, level or _guess_level(line), OUTPUT)


def error_line(text: str, fields: Mapping[str, Scalar] | None) -> str:
    """Return the last line of a failed command, as JSON if `fields` are given."""
    line = ERROR_PREFIX + _shorten(text)
    return line if fields is None else _write_record(line, fields, FATAL_LEVEL, LAST_LINE)


def _shorten(text: str) -> str:
    """Leave out the middle of a long text: its beginning has the cause, and its end the advice."""
    half = MAX_ERROR_CHARS // 2
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:half]} ... {text[-half:]}"


def error_of(line: str) -> str | None:
    """Return the reason of a failure if `error_line` wrote the line, as text or JSON; else None."""
    if FATAL_LEVEL in line and (own := _read_object(line)) is not None:
        is_last = (own.get("level"), own.get("logger")) == (FATAL_LEVEL, LAST_LINE)
        line = str(own.get("message")) if is_last else ""
    return line.removeprefix(ERROR_PREFIX) if line.startswith(ERROR_PREFIX) else None


def _read_object(line: str) -> dict[str, Any] | None:
    if not line.lstrip().startswith("{"):
        return None
    try:
        parsed = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _write_record(message: str, fields: Mapping[str, Scalar], level: str, logger: str) -> str:
    base = {"timestamp": timestamp(time.time()), "level": level, "logger": logger, "message": message}
    return json.dumps({**base, **fields}, allow_nan=False)


def _guess_level(line: str) -> str:
    head = line[:HEAD_CHARS]
    if match := _LETTER.match(head):
        return _LETTERS[match[1]]
    if match := _NAME.search(head):
        return _NAMES.get(match[1], match[1])
    return "ERROR" if _FAULT.search(head) else DEFAULT_LEVEL
