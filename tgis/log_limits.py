"""Rate limits for repeated log records: lines of one kind, and tracebacks from one place."""

import logging
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType

KIND = "log_kind"
"""Key of `extra` for lines that any client can cause: `extra={KIND: "unauthenticated"}`. At most one line of
each kind is logged per second."""
OMITTED = "omitted"
"""Attribute of a record: number of lines of its kind, or of tracebacks from its place, omitted before it."""
KIND_S = 1.0
TRACEBACK_S = 60.0
MAX_FRAMES = 20
MAX_PLACES = 256

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


class RecordLimits(logging.Filter):
    """Handler filter that omits repeated lines and tracebacks, and adds their number to the next record."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._last: OrderedDict[object, tuple[float, int]] = OrderedDict()
        """Time of the last line or traceback, and number omitted since then, by kind or place."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind = getattr(record, KIND, None)
        if kind is not None and not self._admit(kind, KIND_S, record):
            return False
        if isinstance(record.exc_info, tuple) and record.exc_info[1] is not None:
            place = record.name, record.lineno, *place_of(record.exc_info[1])
            if not self._admit(place, TRACEBACK_S, record):
                record.exc_info = record.exc_text = None
        return True

    def _admit(self, key: object, interval_s: float, record: logging.LogRecord) -> bool:
        now = self._clock()
        last, num_omitted = self._last.get(key, (-interval_s, 0))
        if now - last < interval_s:
            self._last[key] = last, num_omitted + 1
            return False
        self._last[key] = now, 0
        self._last.move_to_end(key)
        while len(self._last) > MAX_PLACES:
            self._last.popitem(last=False)
        if num_omitted:
            setattr(record, OMITTED, num_omitted)
        return True


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
