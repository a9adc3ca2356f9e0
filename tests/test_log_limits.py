"""Lines of one kind once a second, tracebacks of one place once a minute, each with the number omitted."""

import io
import json
import logging
import sys
import threading
from collections.abc import Iterator

import pytest

from tgis.log_limits import KIND, MAX_FRAMES, MAX_PLACES, OMITTED, RecordLimits
from tgis.logs import JsonFormatter, TextFormatter


class Log:
    def __init__(self, formatter: logging.Formatter) -> None:
        self.now, self._stream = 1000.0, io.StringIO()
        handler = logging.StreamHandler(self._stream)
        handler.setFormatter(formatter)
        handler.addFilter(RecordLimits(lambda: self.now))
        self.logger = logging.getLogger("tests.log_limits")
        self.logger.handlers, self.logger.propagate = [handler], False
        self.logger.setLevel(logging.INFO)

    def text(self) -> str:
        text = self._stream.getvalue()
        self._stream.seek(0)
        self._stream.truncate()
        return text

    def fail(self, depth: int = 0, kind: str | None = None) -> None:
        try:
            self._raise(depth)
        except ValueError:
            self.logger.exception("failed", extra={KIND: kind})

    def _raise(self, depth: int) -> None:
        if depth:
            self._raise(depth - 1)
        raise ValueError("secret")


@pytest.fixture
def log() -> Iterator[Log]:
    log = Log(TextFormatter())
    yield log
    log.logger.handlers = []


def test_one_line_a_second_of_each_kind(log: Log) -> None:
    for _ in range(50):
        log.logger.warning("refused", extra={KIND: "a"})
        log.logger.warning("unread", extra={KIND: "b"})
        log.logger.warning("other")
    lines = log.text().splitlines()
    assert [sum(word in line for line in lines) for word in ("refused", "unread", "other")] == [1, 1, 50]
    log.now += 1
    log.logger.warning("refused", extra={KIND: "a"})
    assert log.text().endswith("refused omitted=49\n")
    log.now += 1
    log.logger.warning("refused", extra={KIND: "a"})
    assert log.text().endswith("refused\n")


def test_lines_that_no_other_follows_are_reported() -> None:
    """Each kind has one report, after its pause, which is over when the test's clock says so."""
    log, reported = Log(TextFormatter()), threading.Event()
    [handler] = log.logger.handlers

    def report(record: logging.LogRecord) -> None:
        handler.handle(record)
        reported.set()

    handler.filters = [RecordLimits(lambda: log.now, report, report_s=0.05)]
    for kind in ("a", "a", "a", "b", "c", "c"):
        log.logger.warning("no %s", kind, extra={KIND: kind})
    log.logger.warning("other")
    assert not reported.wait(0.2)
    assert [line.split(": ")[1] for line in log.text().splitlines()] == ["no a", "no b", "no c", "other"]
    log.now += 1
    log.logger.warning("no c", extra={KIND: "c"})
    assert reported.wait(10)
    text = log.text()
    assert "no c omitted=1" in text
    assert text.count("\n") == 2
    assert text.endswith(
        "WARNING tests.log_limits: lines like this one were omitted 2 times: no a omitted=2\n"
    )
    log.now += 1
    log.logger.warning("no a", extra={KIND: "a"})
    assert log.text().endswith(": no a\n")


def test_a_traceback_of_each_place_once_a_minute(log: Log) -> None:
    for _ in range(5):
        log.fail()
    assert log.text().count("Traceback") == 1
    log.now += 59
    log.fail()
    text = log.text()
    assert "Traceback" not in text
    assert "failed" in text
    try:
        sys.intern(5)  # type: ignore[arg-type]
    except TypeError:
        log.logger.exception("failed")
    assert "Traceback" in log.text()
    log.now += 1
    log.fail()
    assert "failed omitted=5\n    Traceback" in log.text()


@pytest.mark.parametrize("depth", [0, 10, 500])
def test_tracebacks_have_their_last_frames(log: Log, depth: int) -> None:
    log.fail(depth)
    text = log.text()
    assert "ValueError: secret" in text
    assert 2 <= text.count("  File ") <= MAX_FRAMES  # repeated frames are one
    assert text.count("\n") < 2 * MAX_FRAMES + 4
    formatted = Log(JsonFormatter())
    formatted.fail(depth)
    assert json.loads(formatted.text())["traceback"].count("\n") < 2 * MAX_FRAMES + 4


def test_kinds_that_are_kept_are_bounded() -> None:
    limits = RecordLimits()
    for i in range(10 * MAX_PLACES):
        record = logging.LogRecord("a", logging.INFO, "", 0, "", (), None)
        setattr(record, KIND, f"kind {i}")
        assert limits.filter(record)
    assert len(limits._last) == MAX_PLACES


def test_kinds_with_omitted_lines_are_bounded() -> None:
    now = 0.0
    limits = RecordLimits(lambda: now, lambda record: None, report_s=0.05)
    for i in range(2 * MAX_PLACES):
        for _ in range(2):
            limits.filter(make_record(f"kind {i}"))
    assert len(limits._unreported) == MAX_PLACES
    now = 1.0  # ends the timer


def make_record(kind: str, *args: object) -> logging.LogRecord:
    record = logging.LogRecord("a", logging.INFO, "", 0, "no %d", args or (1,), None)
    setattr(record, KIND, kind)
    return record


def test_one_timer_runs_at_a_time() -> None:
    """Lines that are written after omitted ones, and omitted again, need no timer each."""
    before, now = threading.active_count(), 0.0
    limits = RecordLimits(lambda: now, lambda record: None, report_s=0.5)
    for _ in range(20):
        now += 1
        for _ in range(3):
            limits.filter(make_record("a"))
    assert threading.active_count() <= before + 1
    now += 1  # ends the timer


def test_a_line_is_omitted_although_the_system_has_no_thread_for_a_timer() -> None:
    """The next omitted line starts the timer, which reports all of them."""
    reports: list[logging.LogRecord] = []
    reported, now = threading.Event(), 0.0

    def report(record: logging.LogRecord) -> None:
        reports.append(record)
        reported.set()

    limits = RecordLimits(lambda: now, report, report_s=0.05)
    usual = threading.stack_size(1 << 47)  # no system maps so much
    try:
        assert [limits.filter(make_record("a")) for _ in range(3)] == [True, False, False]
    finally:
        threading.stack_size(usual)
    assert not limits.filter(make_record("a"))
    now = 1.0
    assert reported.wait(10)
    assert [vars(each)[OMITTED] for each in reports] == [3]


def test_an_omitted_line_whose_arguments_do_not_fit_raises_nothing() -> None:
    now = 0.0
    limits = RecordLimits(lambda: now, lambda record: None, report_s=0.05)
    assert limits.filter(make_record("a"))
    assert not limits.filter(make_record("a", "text"))
    now = 1.0  # ends the timer


def test_lines_with_tracebacks_have_the_number_of_omitted_lines(log: Log) -> None:
    """Whether the traceback is logged, as those of the first and the last second are, or not."""
    for _ in range(61):
        for _ in range(3):
            log.fail(kind="a")
        log.now += 1
    text = log.text()
    lines = [line.partition("failed")[2] for line in text.splitlines() if "failed" in line]
    assert lines == ["", *[" omitted=2"] * 60]
    assert text.count("Traceback") == 2
