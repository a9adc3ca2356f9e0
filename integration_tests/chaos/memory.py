"""Measures the growth of processes."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

INTERVAL_S = 1.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int) -> int:
    """Return the resident memory. Raises OSError if the process does not exist."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the later half of (seconds, bytes), by least squares, in bytes per second; 0 if
    there are too few."""
    later = np.array(samples[len(samples) // 2 :])  # [num_samples, 2]
    if len(later) < 10:
        return 0.0
    return float(np.polyfit(later[:, 0], later[:, 1], 1)[0])


class Watch:
    """Sample the processes that `find` returns, by name and id, until `end`."""

    def __init__(self, find: Callable[[], dict[str, int]]) -> None:
        self.samples: dict[tuple[str, int], list[tuple[float, float]]] = {}
        self._find, self._ending = find, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def end(self) -> dict[str, float]:
        """Return, for each name, the slope of the longest-lived process, in bytes per second."""
        self._ending.set()
        self._thread.join()
        longest: dict[str, list[tuple[float, float]]] = {}
        for (name, _), samples in self.samples.items():
            longest[name] = max(longest.get(name, []), samples, key=len)
        return {name: slope(samples) for name, samples in sorted(longest.items())}

    def _sample(self) -> None:
        while not self._ending.wait(INTERVAL_S):
            for name, pid in self._find().items():
                try:
                    sample = (time.monotonic(), float(resident_bytes(pid)))
                except OSError:
                    continue  # the process has just ended
                self.samples.setdefault((name, pid), []).append(sample)
