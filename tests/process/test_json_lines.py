"""Every line that a process prints becomes one JSON object, and an object keeps its content."""

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgis.process import json_lines

FIELDS = {"process": "shard", "node": 1, "rank": 0}

# Lines from the stderr of other programs, with their levels.
FOREIGN = [
    ("WARNING: All log messages before absl::InitializeLog() is called are written to STDERR", "WARNING"),
    ("E0000 00:00:1714000000.000000   12345 ssl_transport_security.cc:1884] Handshake failed", "ERROR"),
    ("I0425 14:00:00.123456 12345 subchannel.cc:12] connected", "INFO"),
    ("F0425 14:00:00.123456 12345 check.cc:12] Check failed", "CRITICAL"),
    ("[W801 12:34:56.123456789 ProcessGroupGloo.cpp:712] Warning: unable to verify", "WARNING"),
    ("[rank1]:[E801 12:34:56.123456789 ProcessGroup.cpp:12] failure detected", "ERROR"),
    ("/usr/lib/python3/dist-packages/x.py:12: UserWarning: the weights are old", "WARNING"),
    ("Traceback (most recent call last):", "ERROR"),
    ("RuntimeError: nothing to be done", "ERROR"),
    ("terminate called after throwing an instance of 'std::bad_alloc'", "ERROR"),
    ("  what():  std::bad_alloc", "ERROR"),
    ("Fatal Python error: Segmentation fault", "ERROR"),
    ("2026-01-31T12:00:00.123Z INFO tgis.convert: done", "INFO"),
    ("2026-01-31 12:00:00 DEBUG something", "DEBUG"),
    ("who knows what this is", "WARNING"),
    ("", "WARNING"),
]


def read(line: str) -> dict[str, Any]:
    """Parse as a strict reader of the standard would."""
    assert line.isascii()
    assert "\n" not in line
    entry = json.loads(line, parse_constant=pytest.fail)
    assert isinstance(entry, dict)
    return entry


@pytest.mark.parametrize(("line", "level"), FOREIGN)
def test_a_level_is_read_from_library_output(line: str, level: str) -> None:
    entry = read(json_lines.to_json(line, FIELDS))
    assert (entry["level"], entry["message"], entry["logger"]) == (level, line, "output")
    assert entry["timestamp"].endswith("Z")
    assert {name: entry[name] for name in FIELDS} == FIELDS


@pytest.mark.parametrize(
    "line",
    [
        "[1, 2]",
        "123",
        '"text"',
        "null",
        "NaN",
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": ' + "9" * 5000 + "}",
        '{"a": ',
        '{"a": 1} and more',
        '{"a": 1}{"b": 2}',
        "{'a': 1}",
        '{"a": "\t"}',
        '{"a":' * 100_000 + "1" + "}" * 100_000,
        "\ufeff{}",
        "a\x00b\r",
        "\ud800",
        "y" * (1 << 20),
    ],
)
def test_lines_that_are_not_objects_become_messages(line: str) -> None:
    assert read(json_lines.to_json(line, FIELDS))["message"] == line


def test_fields_of_json_objects_are_preserved() -> None:
    own = '{"timestamp": "t", "level": "INFO", "logger": "x", "message": "m", "rank": 7, "é": [1.5, null]}'
    assert read(json_lines.to_json(own, FIELDS)) == json.loads(own) | {"process": "shard", "node": 1}
    assert read(json_lines.to_json(" {} \r", FIELDS)) == FIELDS


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="\n", exclude_categories=())))
def test_any_line_becomes_an_object(line: str) -> None:
    read(json_lines.to_json(line, FIELDS))


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=3), st.booleans())
def test_any_object_stays_one(own: dict[str, Any], is_ascii: bool) -> None:
    line = json.dumps(own, ensure_ascii=is_ascii)
    assert read(json_lines.to_json(line, FIELDS)) == FIELDS | own


def test_last_words_are_found_in_either_form() -> None:
    line = json_lines.error_line("it does not fit", {"process": "shard", "rank": 1})
    entry = read(line)
    assert (entry["level"], entry["message"], entry["rank"]) == ("CRITICAL", "error: it does not fit", 1)
    assert json_lines.error_of(line) == "it does not fit"
    assert json_lines.error_line("it does not fit", None) == "error: it does not fit"
    assert json_lines.error_of("error: it does not fit") == "it does not fit"
    for other in ("errors: 3", '{"message": "error: said in passing", "level": "INFO"}', "{", "[]", ""):
        assert json_lines.error_of(other) is None


UNLOGGED = """
import logging, sys, threading, warnings
from tgis import logs

logs.setup("warning", True, {"process": "launcher"})
logs.catch_unlogged()
warnings.warn("old\\nweights")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()

class Undead:
    def __del__(self):
        raise ValueError("in\\n__del__")

Undead()
logging.getLogger("library").warning("%d", "no number")
raise RuntimeError("the end\\nin two lines")
"""


def test_output_of_python_itself_is_logged() -> None:
    """Warnings, and errors that end a thread, a finalizer, a record or the process: each is one object."""
    result = subprocess.run([sys.executable, "-c", UNLOGGED], capture_output=True, timeout=30, check=False)
    assert (result.returncode, result.stdout) == (1, b"")
    lines = [read(line) for line in result.stderr.decode().splitlines()]
    assert len(lines) == 5, result.stderr.decode()
    assert {line["process"] for line in lines} == {"launcher"}
    assert [line["level"] for line in lines] == ["WARNING", "ERROR", "ERROR", "ERROR", "CRITICAL"]
    assert "old\nweights" in lines[0]["message"]
    causes = ("ZeroDivisionError", "in\n__del__", "TypeError", "the end\nin two lines")
    for line, cause in zip(lines[1:], causes, strict=True):
        assert cause in line["traceback"]


@pytest.mark.parametrize("fields", [None, FIELDS])
def test_a_long_reason_loses_its_middle(fields: dict[str, str | int] | None) -> None:
    text = "config.json has " + "a" * 1_000_000 + ", which is no number"
    line = json_lines.error_line(text, fields)
    error = json_lines.error_of(line)
    assert error is not None
    assert (error[:16], error[-20:]) == (text[:16], text[-20:])
    assert len(line) < 5_000
    whole = "b" * json_lines.MAX_ERROR_CHARS
    assert json_lines.error_of(json_lines.error_line(whole, fields)) == whole
