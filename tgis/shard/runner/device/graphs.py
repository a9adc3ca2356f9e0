"""Whole steps as captured graphs, by their size: F computes a step up to the logits, and S samples, appends
the tokens and copies the answers. S is a graph of its own because it may wait for what F does not."""

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from tgis.errors import first_line
from tgis.shard.runner.device.stream import DeviceStream, Graph
from tgis.shard.runner.graph_sizes import GraphSize

logger = logging.getLogger(__name__)

MAX_CAPTURE_S, MAX_PROMPT_CAPTURE_S = 30.0, 10.0


class StepParts(NamedTuple):
    """Work of a step of a fixed size. Both read and write fixed tensors only, which describe a
    step of idle rows while they are captured, because they are also run then."""

    forward: Callable[[], None]
    sample: Callable[[], None]


class CapturedStep(NamedTuple):
    size: GraphSize
    forward: Graph
    sample: Graph
    parts: StepParts  # whose memory the graphs use


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
    """Captured steps. `make_parts` returns the parts of a step of a size; `memory_left` returns the bytes of
    the device that nobody has, as its driver counts them."""

    def __init__(
        self,
        stream: DeviceStream,
        make_parts: Callable[[GraphSize], StepParts],
        memory_left: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._stream, self._make_parts = stream, make_parts
        self._memory_left, self._clock = memory_left, clock
        self._steps: dict[GraphSize, CapturedStep] = {}  # by rising number of tokens
        self.refusal: str | None = None
        """Why steps could not be captured."""

    @property
    def sizes(self) -> list[GraphSize]:
        return list(self._steps)

    def find(self, num_rows: int, num_prompt_tokens: int = 0) -> CapturedStep | None:
        """Return the smallest step that has at least as many rows and tokens of prompts, the others of which
        are to be idle."""
        for size, step in self._steps.items():
            if size.num_rows >= num_rows and size.num_prompt_tokens >= num_prompt_tokens:
                return step
        return None

    def capture(self, sizes: Iterable[GraphSize]) -> None:
        """Capture steps of these sizes: those with prompts first, and then the largest first, because smaller
        ones use their memory again. What is left after 30 seconds, 10 of them for prompts, is left out: such
        steps take the next larger size. No step of a kind is captured if one cannot be. Raises errors of the
        device, but for a lack of memory."""
        began, fresh = self._clock(), set(sizes) - set(self._steps)
        with _hold_garbage():
            for has_prompts, limit in ((True, MAX_PROMPT_CAPTURE_S), (False, MAX_CAPTURE_S)):
                kind = [size for size in fresh if (size.num_prompt_tokens > 0) is has_prompts]
                kind.sort(key=lambda size: size.num_tokens, reverse=True)
                self._capture_kind(kind, began + limit)
        self._steps = dict(sorted(self._steps.items(), key=lambda item: item[0].num_tokens))

    def _capture_kind(self, sizes: Sequence[GraphSize], end: float) -> None:
        began, before = self._clock(), self._memory_left()
        for done, size in enumerate(sizes):
            if self._clock() >= end:
                used = before - self._memory_left()
                logger.warning(
                    "steps of %s and fewer share larger CUDA graphs: %d graphs took %.0f s and %.0f MiB",
                    *(size, done, self._clock() - began, used / 2**20),
                )
                break
            if not self._add(size):
                break

    def clear(self) -> None:
        """Drop all graphs. Their memory is free once the stream's device releases what it keeps."""
        self._steps = {}

    def _add(self, size: GraphSize) -> bool:
        """Capture a step. Return False, and log why, if no more of its kind can be captured."""
        parts = self._make_parts(size)
        try:
            forward = self._stream.capture(parts.forward)
            sample = self._stream.capture(parts.sample)
        except torch.OutOfMemoryError:
            self.refusal = "out of memory"
            logger.warning(
                "no memory for CUDA graphs of steps of %s: smaller steps share larger graphs", size
            )
            return False
        except RuntimeError as error:
            self.refusal = reason = first_line(error)
            logger.warning("no CUDA graphs: steps of %s cannot be captured: %s", size, reason)
            self._drop_kind(size)
            return False
        self._steps[size] = CapturedStep(size, forward, sample, parts)
        return True

    def _drop_kind(self, like: GraphSize) -> None:
        has_prompts = like.num_prompt_tokens > 0
        kept = [size for size in self._steps if (size.num_prompt_tokens > 0) is not has_prompts]
        self._steps = {size: self._steps[size] for size in kept}
