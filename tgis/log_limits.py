"""Rate limits for repeated log records: lines of one kind, and tracebacks from one place."""

import contextlib
import logging
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NamedTuple

KIND = "log_kind"
"""Key of `extra` for lines that any client can cause: `extra={KIND: "unauthenticated"}`. At most one line of
each kind is logged per second."""
OMITTED = "omitted"
"""Attribute of a record: number of lines of its kind, or of tracebacks from its place, omitted before it."""
REPORT = "lines like this one were omitted %d times: %s"
KIND_S = 1.0
TRACEBACK_S = 60.0
MAX_FRAMES = 20
MAX_PLACES = 256

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


class _Omitted(NamedTuple):
    """First omitted line of a kind after the last one that was logged."""

    logger: str
    level: int
    text: str

    def report(self, num: int) -> logging.LogRecord:
        record = logging.LogRecord(self.logger, self.level, "", 0, REPORT, (num, self.text), None)
        setattr(record, OMITTED, num)
        return record


class RecordLimits(logging.Filter):
    """Handler filter that omits repeated lines and tracebacks, and adds their number to the next record. If
    no further line of a kind comes in time, a line of its own reports the number."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[logging.LogRecord], object] | None = None,
        report_s: float = 2 * KIND_S,
    ) -> None:
        """`report` writes the reports, which come `report_s` seconds after the first omitted line; None: only
        the next lines have the numbers."""
        super().__init__()
        self._clock = clock
        self._report = report
        self._report_s = report_s
        self._lock = threading.RLock()  # reports come from another thread
        self._unreported: dict[object, _Omitted] = {}  # kinds that `_last` has, too
        self._has_timer = False
        self._last: OrderedDict[object, tuple[float, int]] = OrderedDict()
        """Time of the last line or traceback, and number omitted since then, by kind or place."""

    def filter(self, record: logging.LogRecord) -> bool:
        with self._lock:
            return self._filter(record)

    def _filter(self, record: logging.LogRecord) -> bool:
        kind = getattr(record, KIND, None)
        if kind is not None and not self._admit_line(kind, record):
            return False
        if isinstance(record.exc_info, tuple) and record.exc_info[1] is not None:
            place = record.name, record.lineno, *place_of(record.exc_info[1])
            if not self._admit(place, TRACEBACK_S, record):
                record.exc_info = record.exc_text = None
        return True

    def _admit_line(self, kind: object, record: logging.LogRecord) -> bool:
        if self._admit(kind, KIND_S, record):
            self._unreported.pop(kind, None)
            return True
        if self._report is not None:
            if kind not in self._unreported:
                self._unreported[kind] = _Omitted(record.name, record.levelno, _text_of(record))
            self._start_timer(self._report)
        return False

    def _start_timer(self, report: Callable[[logging.LogRecord], object]) -> None:
        """Start the only timer, unless it runs. If the system has no thread for it, the next omitted line
        tries again."""
        if self._has_timer:
            return
        timer = threading.Timer(self._report_s, self._report_omitted, (report,))
        timer.daemon = True
        with contextlib.suppress(RuntimeError):
            timer.start()
            self._has_timer = True

    def _report_omitted(self, report: Callable[[logging.LogRecord], object]) -> None:
        with self._lock:
            self._has_timer = False
            reports = list(self._take_reports())
            if self._unreported:
                self._start_timer(report)
        for record in reports:
            report(record)

    def _take_reports(self) -> Iterator[logging.LogRecord]:
        """Yield the reports of the kinds whose pause is over."""
        now = self._clock()
        for kind, first in list(self._unreported.items()):
            last, num_omitted = self._last[kind]
            if now - last >= KIND_S:
                del self._unreported[kind]
                self._last[kind] = last, 0
                yield first.report(num_omitted)

    def _admit(self, key: object, interval_s: float, record: logging.LogRecord) -> bool:
        now = self._clock()
        last, num_omitted = self._last.get(key, (-interval_s, 0))
        if now - last < interval_s:
            self._last[key] = last, num_omitted + 1
            return False
        self._last[key] = now, 0
        self._last.move_to_end(key)
        while len(self._last) > MAX_PLACES:
            oldest, _ = self._last.popitem(last=False)
            self._unreported.pop(oldest, None)
        if num_omitted and not hasattr(record, OMITTED):  # omitted lines include omitted tracebacks
            setattr(record, OMITTED, num_omitted)
        return True


def _text_of(record: logging.LogRecord) -> str:
    """Return the record's text, or its format if the arguments do not fit. Handlers report errors of records
    that they write; one raised by a filter would reach the code that logs."""
    try:
        return record.getMessage()
    except Exception:
        return str(record.msg)


def place_of(error: BaseException) -> tuple[str, str, int]:
    """Return the error's type, and the file and line that raised it."""
    end = error.__traceback__
    while end is not None and end.tb_next is not None:
        end = end.tb_next
    if end is None:
        return type(error).__name__, "", 0
    return type(error).__name__, end.tb_frame.f_code.co_filename, end.tb_lineno


def format_traceback(exc_info: _ExcInfo | tuple[None, None, None]) -> str:
    """Format a traceback with at most the last `MAX_FRAMES` frames of each error."""
    return "".join(traceback.format_exception(*exc_info, limit=-MAX_FRAMES)).rstrip("\n")
