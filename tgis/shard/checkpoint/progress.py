"""Tells the log how far the slow parts of a start have come: reading a checkpoint, compiling kernels."""

import logging
import time
from collections.abc import Callable

from tgis.logs import FIELDS

logger = logging.getLogger(__name__)

STEP_PERCENT, LEAST_SECONDS, MOST_SECONDS = 10.0, 2.0, 30.0
FIRST_COMPILING_S, COMPILING_S = 1.0, 5.0  # of compiling, before the first line and between two


class Progress:
    """A line for every ten percent that took two seconds at least, and every thirty seconds; one at the end.

    Percent are of the checkpoint's bytes, bytes those that this process read, its part of each tensor."""

    def __init__(self, total_bytes: int, clock: Callable[[], float] = time.monotonic):
        self._total_bytes, self._clock = max(1, total_bytes), clock
        self._began = self._said = clock()
        self._said_percent = 0.0
        self._seen: set[str] = set()
        self._seen_bytes = self._read_bytes = 0

    def add(self, label: str, whole_bytes: int, read_bytes: int) -> None:
        """A part of the tensor `label` was read."""
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
    """A line after one second of compiling, then after every five, and one at the end; none where the code of
    all kernels was found.

    Which kernels a model needs is not known before it has used them."""

    def __init__(self) -> None:
        self.num_kernels = 0
        """Number of kernels that there are, of which a model needs some."""
        self._num_compiled, self._seconds, self._said_seconds = 0, 0.0, 0.0

    def add(self, seconds: float, place: str) -> None:
        """Count a kernel that took so many seconds to compile; `place` says where its code is kept."""
        self._num_compiled += 1
        self._seconds += seconds
        interval = COMPILING_S if self._said_seconds else FIRST_COMPILING_S
        if self._seconds >= self._said_seconds + interval:
            self._said_seconds = self._seconds
            self._log(f"compiling kernels for this processor; the code {place}", at_most=self.num_kernels)

    def finish(self) -> None:
        """Log the sum, when the model can answer."""
        if self._said_seconds:
            self._log("kernels compiled")

    def _log(self, message: str, **more: int) -> None:
        fields = {"kernels": self._num_compiled, **more, "seconds": round(self._seconds, 1)}
        logger.info(message, extra={FIELDS: fields})
