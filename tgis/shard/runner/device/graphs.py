"""Whole steps as captured graphs, by their number of rows: F computes a step up to the logits, and S samples,
appends the tokens and copies the answers. S is a graph of its own because it may wait for what F does not."""

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from tgis.errors import first_line
from tgis.shard.runner.device.stream import DeviceStream, Graph

logger = logging.getLogger(__name__)

MAX_CAPTURE_S = 30.0

# Ends of ranges of sizes, and the steps between the sizes of each.
_SPACING = ((4, 2), (16, 4), (64, 8), (256, 16))
_WIDEST = 64


class StepParts(NamedTuple):
    """Work of a step with a fixed number of rows. Both read and write fixed tensors only, which describe a
    step of idle rows while they are captured, because they are also run then."""

    forward: Callable[[], None]
    sample: Callable[[], None]


class CapturedStep(NamedTuple):
    num_rows: int
    forward: Graph
    sample: Graph
    parts: StepParts  # whose memory the graphs use


def graph_sizes(asked: Sequence[int] | None, max_rows: int) -> list[int]:
    """Return the numbers of rows, rising, to capture steps of. `asked` are those of the operator, 0 for none;
    larger ones than `max_rows` have no use. None: the default ones, of which the largest is `max_rows`."""
    if asked is not None:
        return sorted({size for size in asked if 0 < size <= max_rows})
    sizes, size = [], 1
    while size < max_rows:
        sizes.append(size)
        spacing = next((spacing for end, spacing in _SPACING if size < end), _WIDEST)
        size = size + spacing if size > 1 else 2
    return [*sizes, max_rows]


@contextmanager
def _hold_garbage() -> Iterator[None]:
    """Collect no garbage meanwhile: to free a device's memory or a graph would end a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class StepGraphs:
    """Captured steps. `make_parts` returns the parts of a step with a number of rows; `memory_left` returns
    the bytes of the device that nobody has, as its driver counts them."""

    def __init__(
        self,
        stream: DeviceStream,
        make_parts: Callable[[int], StepParts],
        memory_left: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._stream, self._make_parts = stream, make_parts
        self._memory_left, self._clock = memory_left, clock
        self._steps: dict[int, CapturedStep] = {}  # by rising number of rows
        self.refusal: str | None = None
        """Why steps could not be captured."""

    @property
    def sizes(self) -> list[int]:
        return list(self._steps)

    def find(self, num_rows: int) -> CapturedStep | None:
        """Return the smallest step that has at least as many rows, the others of which are to be idle."""
        sizes = self.sizes
        place = bisect_left(sizes, num_rows)
        return self._steps[sizes[place]] if place < len(sizes) else None

    def capture(self, sizes: Sequence[int]) -> None:
        """Capture steps of these numbers of rows, largest first, until 30 seconds have passed. Steps of the
        sizes that are left out take the next larger one. None is captured if one cannot be. Raises errors of
        the device, but for a lack of memory."""
        with _hold_garbage():
            self._capture_all(sizes)
        self._steps = dict(sorted(self._steps.items()))

    def _capture_all(self, sizes: Sequence[int]) -> None:
        began, before = self._clock(), self._memory_left()
        for done, size in enumerate(sorted(set(sizes) - set(self._steps), reverse=True)):
            seconds = self._clock() - began
            if seconds >= MAX_CAPTURE_S:
                used = before - self._memory_left()
                logger.warning(
                    "steps of %d rows and fewer share larger CUDA graphs: %d graphs took %.0f s and %.0f MiB",
                    *(size, done, seconds, used / 2**20),
                )
                break
            if not self._add(size):
                break

    def clear(self) -> None:
        """Drop all graphs. Their memory is free once the stream's device releases what it keeps."""
        self._steps = {}

    def _add(self, size: int) -> bool:
        """Capture a step. Return False, and log why, if no more can be captured."""
        parts = self._make_parts(size)
        try:
            forward = self._stream.capture(parts.forward)
            sample = self._stream.capture(parts.sample)
        except torch.OutOfMemoryError:
            self.refusal = "out of memory"
            logger.warning(
                "no memory for CUDA graphs of steps of %d rows: smaller steps share larger graphs", size
            )
            return False
        except RuntimeError as error:
            self.refusal = reason = first_line(error)
            logger.warning("no CUDA graphs: steps of %d rows cannot be captured: %s", size, reason)
            self.clear()
            return False
        self._steps[size] = CapturedStep(size, forward, sample, parts)
        return True
