"""Logs the progress of the slow steps of a start: reading a checkpoint and compiling kernels."""

import logging
import time
from collections.abc import Callable

from tgis.logs import FIELDS

logger = logging.getLogger(__name__)

STEP_PERCENT = 10.0
MIN_INTERVAL_S = 2.0
MAX_INTERVAL_S = 30.0
COMPILING = (
    "compiling kernels for this processor that were not compiled when the service was installed; on an idle "
    "machine this takes 10 to 30 seconds, and the code %s"
)
FIRST_COMPILING_S = 1.0  # compile time before the first line
COMPILING_S = 5.0  # compile time between two lines


class LoadProgress:
    """Progress of reading a checkpoint. It logs every ten percent (at most one line in two seconds), every
    thirty seconds, and at the end. The percentage is of the checkpoint; `bytes` counts what this rank read of
    it. Files are mapped, so they are read while the weights are packed, and the time is that of both."""

    running = "reading and packing weights"
    """Message of a line while weights are read; another one if they are not read to be kept."""
    finished = "weights read and packed"

    def __init__(self, total_bytes: int, clock: Callable[[], float] = time.monotonic):
        self._total_bytes = max(1, total_bytes)
        self._clock = clock
        self._start_time = self._logged_at = clock()
        self._logged_percent = 0.0
        self._seen: set[str] = set()
        self._seen_bytes = self._read_bytes = 0

    def add(self, label: str, whole_bytes: int, read_bytes: int) -> None:
        """Count the bytes read from a part of the tensor `label`."""
        self._read_bytes += read_bytes
        if label not in self._seen:
            self._seen.add(label)
            self._seen_bytes += whole_bytes
        percent = min(100.0, 100 * self._seen_bytes / self._total_bytes)
        now = self._clock()
        elapsed = now - self._logged_at
        is_step = elapsed >= MIN_INTERVAL_S and percent >= self._logged_percent + STEP_PERCENT
        if is_step or elapsed >= MAX_INTERVAL_S:
            self._logged_at = now
            self._logged_percent = percent
            self._log(self.running, percent=round(percent))

    def finish(self) -> None:
        self._log(self.finished)

    def _log(self, message: str, **more: int) -> None:
        seconds = self._clock() - self._start_time
        fields = {
            **more,
            "bytes": self._read_bytes,
            "seconds": round(seconds, 1),
            "gb_per_s": round(self._read_bytes / 1e9 / max(seconds, 1e-9), 2),
        }
        logger.info(message, extra={FIELDS: fields})


class CompileProgress:
    """Progress of compiling kernels. It logs after one second of compiling, then every five seconds, and at
    the end; nothing if all code is cached. The kernels that a model needs are known only when it uses
    them."""

    def __init__(self) -> None:
        self._num_compiled = 0
        self._seconds = 0.0
        self._logged_seconds = 0.0

    def add(self, seconds: float, place: str) -> None:
        """Count a kernel that took `seconds` to compile; `place` says where its code is stored."""
        self._num_compiled += 1
        self._seconds += seconds
        if not self._logged_seconds and self._seconds >= FIRST_COMPILING_S:
            self._logged_seconds = self._seconds
            logger.info(COMPILING, place)
        elif self._logged_seconds and self._seconds >= self._logged_seconds + COMPILING_S:
            self._logged_seconds = self._seconds
            logger.info("compiled %d kernels in %.1f s so far", self._num_compiled, self._seconds)

    def finish(self) -> None:
        if self._logged_seconds:
            logger.info("compiled %d kernels in %.1f s", self._num_compiled, self._seconds)
