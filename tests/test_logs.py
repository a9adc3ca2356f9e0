"""One record, one line, whatever is in it; and what is in it reads back exactly."""

import json
import logging
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.log_lines import HOSTILE, HOSTILE_TEXTS, parse
from tgis.logs import JsonFormatter, Scalar, TextFormatter, setup


def record(message: str, *args: object, exc_info: object = None, fields: object = None) -> logging.LogRecord:
    made = logging.LogRecord("tgis.test", logging.INFO, "", 0, message, args, exc_info)  # type: ignore[arg-type]
    if fields is not None:
        made.fields = fields
    return made


def raised() -> object:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        return sys.exc_info()


def test_characters_that_could_forge_a_record_are_escaped() -> None:
    line = TextFormatter().format(record("id %s", HOSTILE))
    assert "\n" not in line
    assert "\x1b" not in line
    assert line.endswith(
        r'INFO tgis.test: "id harmless\n2026-01-01T00:00:00.000Z ERROR root: forged \u001b[31m\u0000"'
    )


def test_lines_of_a_traceback_do_not_begin_like_a_record() -> None:
    first, *rest = TextFormatter().format(record("failed", exc_info=raised(), fields={"a": 1})).split("\n")
    assert first.endswith("INFO tgis.test: failed a=1")
    assert rest
    assert all(line.startswith("    ") for line in rest)


@pytest.mark.parametrize("exc_info", [None, raised()])
def test_json_is_one_object(exc_info: object) -> None:
    line = JsonFormatter().format(record("id %s", HOSTILE, exc_info=exc_info))
    assert "\n" not in line
    fields = json.loads(line)
    assert (fields["message"], fields["level"], fields["logger"]) == ("id " + HOSTILE, "INFO", "tgis.test")
    assert ("traceback" in fields) == (exc_info is not None)


def test_plain_words_need_no_quotes() -> None:
    fields = {"id": "a1:2/b", "correlation": "<none>", "n": 3, "s": 0.25, "on": True, "off": None, "t": "a b"}
    line = TextFormatter().format(record("ended %d", 7, fields=fields))
    assert line.split("tgis.test: ")[1] == (
        'ended 7 id=a1:2/b correlation=<none> n=3 s=0.25 on=true off=null t="a b"'
    )


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_hostile_texts_read_back(text: str) -> None:
    fields = {"first": text, "number": 5, "last": text}
    made = record("of %s", text, fields=fields)
    assert parse(TextFormatter().format(made)) == ("of " + text, fields)
    line = JsonFormatter().format(made)
    assert line.isascii()
    assert line.isprintable()
    read = json.loads(line)
    assert {key: read[key] for key in fields} == fields
    assert (read["message"], read["level"], read["logger"]) == ("of " + text, "INFO", "tgis.test")


TEXTS = st.text(st.characters(exclude_categories=())) | st.text('"\\= a\n', max_size=8)
VALUES = TEXTS | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none()


@settings(deadline=None)
@given(TEXTS, st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True), VALUES, max_size=5))
def test_any_text_reads_back(message: str, fields: dict[str, Scalar]) -> None:
    made = record("%s", message, fields=fields)
    # repr, because 1 == True == 1.0; JSON's own two surrogates are one character
    text_read = parse(TextFormatter().format(made))
    assert repr(text_read) == repr((paired(message), {key: paired(value) for key, value in fields.items()}))
    read = json.loads(JsonFormatter().format(made))
    base = ("timestamp", "level", "logger", "message")
    expected = {f"{key}_" if key in base else key: paired(value) for key, value in fields.items()}
    if len(expected) == len(fields):
        assert repr({key: read[key] for key in expected}) == repr(expected)
    assert read["message"] == paired(message)
    assert read["level"] == "INFO"


def paired(value: Scalar) -> Scalar:
    if not isinstance(value, str):
        return value
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


@pytest.mark.parametrize("name", ["timestamp", "level", "logger", "message", "traceback"])
def test_a_field_overrides_nothing_of_the_record(name: str) -> None:
    read = json.loads(JsonFormatter().format(record("real", exc_info=raised(), fields={name: "forged"})))
    assert read[name] != "forged"
    assert read[f"{name}_"] == "forged"


def test_values_that_json_lacks_become_text() -> None:
    fields = {"nan": float("nan"), "inf": float("-inf"), "list": ["a\n", 1], "number": 1}
    expected = {"nan": "nan", "inf": "-inf", "list": r"['a\n', 1]", "number": 1}
    assert parse(TextFormatter().format(record("m", fields=fields))) == ("m", expected)
    read = json.loads(JsonFormatter().format(record("m", fields=fields)), parse_constant=pytest.fail)
    assert {key: read[key] for key in expected} == expected


def test_a_key_is_one_word() -> None:
    line = TextFormatter().format(record("m", fields={"a b=c\n": 1}))
    assert parse(line) == ("m", {"a_b_c_": 1})


def test_an_attribute_of_another_library_is_not_printed() -> None:
    for formatter in (TextFormatter(), JsonFormatter()):
        assert "secret" not in formatter.format(record("m", fields=["secret"]))


@pytest.mark.parametrize("json_output", [False, True])
def test_a_logger_passes_its_fields(json_output: bool, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    uvicorn = logging.getLogger("uvicorn").level
    try:
        setup("info", json_output)
        logging.getLogger("tgis.test").info("text %d", 1, extra={"fields": {"key": "a value"}})
        logging.getLogger("other").debug("not shown")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        logging.getLogger("uvicorn").setLevel(uvicorn)
    [line] = capsys.readouterr().err.splitlines()
    if json_output:
        read = json.loads(line)
        assert (read["message"], read["key"]) == ("text 1", "a value")
    else:
        assert parse(line) == ("text 1", {"key": "a value"})
