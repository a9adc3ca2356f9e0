"""Lines that no logger of this process has written, as JSON objects: what other processes and libraries
print, and the last line of a command that fails."""

import contextlib
import json
import re
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from tgis.logs import Scalar, timestamp

ERROR_PREFIX = "error: "  # begins a process's last line, the one that says why it failed
OUTPUT, LAST_LINE = "output", "tgis"  # the loggers that such lines name
DEFAULT_LEVEL = "WARNING"  # of what shows none: nothing prints without a reason
FATAL_LEVEL = "CRITICAL"
HEAD_CHARS = 200  # in which a line shows its level

_LETTERS = {"D": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": FATAL_LEVEL}
_NAMES = {"WARN": "WARNING", "FATAL": FATAL_LEVEL}
# As glog, absl (gRPC) and c10 (torch) begin a line: a letter, month and day.
_LETTER = re.compile(r"(?:\[rank\d+\]:)?\[?([DIWEF])\d{3,4} ")
_NAME = re.compile(r"\b(DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b")
_FAULT = re.compile(r"Traceback|terminate called|what\(\): |Fatal|[Ee]rror\b|Exception\b|Abort|Segmentation")


def to_json(line: str, fields: Mapping[str, Scalar], level: str | None = None) -> str:
    """Return the line as a JSON object that has these fields. The fields of a line that is an object already
    stay; any other line becomes the message, with the level that it seems to have where none is given."""
    own = _read_object(line)
    if own is not None:
        # Not where a number is too large, or too much is nested, to be written again.
        with contextlib.suppress(ValueError, RecursionError):
            return _write(own | {name: value for name, value in fields.items() if name not in own})
    return _write_record(line, fields, level or _guess_level(line), OUTPUT)


def error_line(text: str, fields: Mapping[str, Scalar] | None) -> str:
    """Return the last line of a command that fails; as JSON where there are fields for it."""
    line = ERROR_PREFIX + text
    return line if fields is None else _write_record(line, fields, FATAL_LEVEL, LAST_LINE)


def error_of(line: str) -> str | None:
    """Return why a process has failed if the line says so, in either form of `error_line`."""
    if FATAL_LEVEL in line and (own := _read_object(line)) is not None:
        is_last = (own.get("level"), own.get("logger")) == (FATAL_LEVEL, LAST_LINE)
        line = str(own.get("message")) if is_last else ""
    return line.removeprefix(ERROR_PREFIX) if line.startswith(ERROR_PREFIX) else None


def _read_object(line: str) -> dict[str, Any] | None:
    """Return None where the line is none."""
    if not line.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _write(record: Mapping[str, Any]) -> str:
    """Raises ValueError where a number is infinite."""
    return json.dumps(record, allow_nan=False)


def _write_record(message: str, fields: Mapping[str, Scalar], level: str, logger: str) -> str:
    base = {"timestamp": timestamp(time.time()), "level": level, "logger": logger, "message": message}
    return _write({**base, **fields})


def _guess_level(line: str) -> str:
    head = line[:HEAD_CHARS]
    if found := _LETTER.match(head):
        return _LETTERS[found[1]]
    if found := _NAME.search(head):
        return _NAMES.get(found[1], found[1])
    return "ERROR" if _FAULT.search(head) else DEFAULT_LEVEL
