"""One record, one line, whatever is in it."""

import json
import logging
import sys

import pytest

from tgis.logs import JsonFormatter, TextFormatter

HOSTILE = "harmless\n2026-01-01T00:00:00.000Z ERROR root: forged \x1b[31m\x00"


def record(message: str, *args: object, exc_info: object = None) -> logging.LogRecord:
    return logging.LogRecord("tgis.test", logging.INFO, "", 0, message, args, exc_info)  # type: ignore[arg-type]


def raised() -> object:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        return sys.exc_info()


def test_text_escapes_what_could_forge_a_record() -> None:
    line = TextFormatter().format(record("id %s", HOSTILE))
    assert "\n" not in line
    assert "\x1b" not in line
    assert line.endswith(
        r"INFO tgis.test: id harmless\n2026-01-01T00:00:00.000Z ERROR root: forged \x1b[31m\x00"
    )


def test_lines_of_a_traceback_do_not_begin_like_a_record() -> None:
    first, *rest = TextFormatter().format(record("failed", exc_info=raised())).split("\n")
    assert first.endswith("INFO tgis.test: failed")
    assert rest
    assert all(line.startswith("    ") for line in rest)


@pytest.mark.parametrize("exc_info", [None, raised()])
def test_json_is_one_object(exc_info: object) -> None:
    line = JsonFormatter().format(record("id %s", HOSTILE, exc_info=exc_info))
    assert "\n" not in line
    fields = json.loads(line)
    assert (fields["message"], fields["level"], fields["logger"]) == ("id " + HOSTILE, "INFO", "tgis.test")
    assert ("traceback" in fields) == (exc_info is not None)
