"""Logs the progress of the slow parts of a start: reading a checkpoint and compiling kernels."""

import logging
import time
from collections.abc import Callable

from tgis.logs import FIELDS

logger = logging.getLogger(__name__)

STEP_PERCENT, LEAST_SECONDS, MOST_SECONDS = 10.0, 2.0, 30.0
FIRST_COMPILING_S, COMPILING_S = 1.0, 5.0  # compile time before the first line, and between two lines


class Progress:
    """Progress of reading a checkpoint: a log line for every ten percent, with at least two seconds between
    lines, a line every thirty seconds, and one at the end. The percentage is of the checkpoint's bytes. The
    bytes are those that this process read, its part of each tensor."""

    def __init__(self, total_bytes: int, clock: Callable[[], float] = time.monotonic):
        self._total_bytes, self._clock = max(1, total_bytes), clock
        self._began = self._said = clock()
        self._said_percent = 0.0
        self._seen: set[str] = set()
        self._seen_bytes = self._read_bytes = 0

    def add(self, label: str, whole_bytes: int, read_bytes: int) -> None:
        """Count a part of the tensor `label` that was read."""
        self._read_bytes += read_bytes
        if label not in self._seen:
            self._seen.add(label)
            self._seen_bytes += whole_bytes
        percent, now = min(100.0, 100 * self._seen_bytes / self._total_bytes), self._clock()
        since = now - self._said
        if since >= MOST_SECONDS or (since >= LEAST_SECONDS and percent >= self._said_percent + STEP_PERCENT):
            self._said, self._said_percent = now, percent
            self._log("reading weights", percent=round(percent))

    def finish(self) -> None:
        self._log("weights read")

    def _log(self, message: str, **more: int) -> None:
        seconds = self._clock() - self._began
        fields = {
            **more,
            "bytes": self._read_bytes,
            "seconds": round(seconds, 1),
            "gb_per_s": round(self._read_bytes / 1e9 / max(seconds, 1e-9), 2),
        }
        logger.info(message, extra={FIELDS: fields})


class CompileProgress:
    """Progress of compiling kernels: a log line after one second of compiling, then one after every five
    seconds, and one at the end; none if all code was found. The kernels that a model needs are not known
    before it has used them."""

    def __init__(self) -> None:
        self.num_kernels = 0  # all kernels, of which a model needs some
        self._num_compiled, self._seconds, self._said_seconds = 0, 0.0, 0.0

    def add(self, seconds: float, place: str) -> None:
        """Count a kernel that took `seconds` to compile; `place` says where its code is kept."""
        self._num_compiled += 1
        self._seconds += seconds
        interval = COMPILING_S if self._said_seconds else FIRST_COMPILING_S
        if self._seconds >= self._said_seconds + interval:
            self._said_seconds = self._seconds
            self._log(f"compiling kernels for this processor; the code {place}", at_most=self.num_kernels)

    def finish(self) -> None:
        if self._said_seconds:
            self._log("kernels compiled")

    def _log(self, message: str, **more: int) -> None:
        fields = {"kernels": self._num_compiled, **more, "seconds": round(self._seconds, 1)}
        logger.info(message, extra={FIELDS: fields})
