"""Device in the CPU's memory that computes work only when something waits for it.

Results differ from those of a prompt device if work reads memory that the host has changed since, or that an
earlier step still needs, or if the host reads answers too early."""

import threading
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

CPU = torch.device("cpu")
POISON = -1


class LateDevice:
    """`DeviceStream` whose queued work is computed by the waiting thread."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        self._lock = threading.RLock()
        self._queue = deque[Callable[[], None]]()
        self._num_queued = self._num_done = 0
        self.max_queued = 0
        """Maximum number of pieces of work in the queue so far."""

    def run(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._queue.append(work)
            self._num_queued += 1
            self.max_queued = max(self.max_queued, len(self._queue))

    def pinned(self, num_words: int) -> Tensor:
        return torch.full((num_words,), POISON, dtype=torch.int32)

    def record(self) -> "LateEvent":
        with self._lock:
            return LateEvent(self, self._num_queued)

    def start_timer(self) -> "LateTimer":
        return LateTimer()

    def capture(self, work: Callable[[], None]) -> "LateGraph":
        self.finish()
        work()
        return LateGraph(self, work)

    def finish(self) -> None:
        self.record().wait()

    def reach(self, count: int) -> None:
        with self._lock:
            while self._num_done < count:
                work = self._queue.popleft()
                self._num_done += 1
                work()


class LateEvent:
    def __init__(self, device: LateDevice, count: int) -> None:
        self._device, self._count = device, count

    def wait(self) -> None:
        self._device.reach(self._count)


class LateTimer:
    """Timer of operators that are not queued as work: the CPU computes them when they are called."""

    def __init__(self) -> None:
        self._ns = -time.perf_counter_ns()

    def stop(self) -> None:
        self._ns += time.perf_counter_ns()

    def read_ns(self) -> int:
        assert self._ns > 0, "the timer was stopped"
        return self._ns


class LateGraph:
    """Graph that simply runs the work again."""

    def __init__(self, device: LateDevice, work: Callable[[], None]) -> None:
        self._device, self._work = device, work

    def replay(self) -> None:
        self._device.run(self._work)
