"""Captures whole steps as CUDA graphs, by size. The forward graph computes the logits; the sampling graph
samples and appends the tokens; there is a second one that also computes token details. They are separate
because sampling may have to wait for masks. Two more sample after accepted drafts, without and with details,
and are replayed once for each draft of a row."""

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch

from tgis.errors import first_line
from tgis.shard.runner.device.stream import DeviceStream, Graph
from tgis.shard.runner.graph_sizes import GraphSize

logger = logging.getLogger(__name__)

MAX_CAPTURE_S = 30.0
MAX_PROMPT_CAPTURE_S = 10.0
MAX_ADAPTER_CAPTURE_S = 15.0  # in addition


class StepParts(NamedTuple):
    """Functions that compute a step of a fixed size. They read and write only fixed tensors. A capture also
    runs them, so the tensors describe a step of idle rows at that time."""

    forward: Callable[[], None]
    sample: Callable[[], None]
    sample_detailed: Callable[[], None]
    """The same as `sample`, and computes token details."""
    sample_next: Callable[[], None] = lambda: None
    """Samples the rows whose last sampled token is a draft."""
    sample_next_detailed: Callable[[], None] = lambda: None


class CapturedStep(NamedTuple):
    size: GraphSize
    forward: Graph
    sample: Graph
    sample_detailed: Graph
    sample_next: tuple[Graph, Graph] | None  # without and with details; None if drafts are not expected
    parts: StepParts  # kept because the graphs use its memory

    def replay_sampling(self, is_detailed: bool) -> None:
        (self.sample_detailed if is_detailed else self.sample).replay()

    def queue_next_sampling(self, is_detailed: bool, stream: DeviceStream) -> None:
        """Sample the rows whose last sampled token is a draft, without a graph if none was captured."""
        if self.sample_next is not None:
            self.sample_next[is_detailed].replay()
        else:
            stream.run(self.parts.sample_next_detailed if is_detailed else self.parts.sample_next)


class OtherGraphs(Protocol):
    """Graphs that are captured after those of steps."""

    def capture(self, sizes: Iterable[int]) -> None:
        """Capture graphs for these numbers of rows, as far as possible."""

    def clear(self) -> None:
        """Drop all graphs."""


class _Outcome(IntEnum):
    """Outcome of a capture, the worst first."""

    FAILED = 0
    OUT_OF_MEMORY = 1
    CAPTURED = 2


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, because freeing device memory or a graph would abort a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class CaptureLimits:
    """Limits of captures: memory, time, and the captures of other ranks. All ranks must have the same graphs,
    because graphs contain collectives."""

    memory_left: Callable[[], int]
    """Function that returns the free bytes of the device as its driver counts them."""
    agree: Callable[[int], int] = lambda value: value
    """Function that returns the smallest of the ranks' values."""
    clock: Callable[[], float] = time.monotonic


class StepGraphs:
    """Captured steps by size. `make_parts` returns the parts of a step of a given size. With `has_drafts`,
    the sampling after drafts is captured, too, and with `proposals` those of a speculator.

    `simplify` launches kernels from now on without what a capture may refuse, and returns False if they were
    launched so already. A capture is repeated if any rank did."""

    def __init__(
        self,
        stream: DeviceStream,
        make_parts: Callable[[GraphSize], StepParts],
        limits: CaptureLimits,
        has_drafts: bool = False,
        proposals: OtherGraphs | None = None,
        simplify: Callable[[], bool] = lambda: False,
    ):
        self._stream = stream
        self._make_parts = make_parts
        self._limits = limits
        self._has_drafts = has_drafts
        self._proposals = proposals
        self._simplify = simplify
        self._steps: dict[GraphSize, CapturedStep] = {}  # sorted by number of tokens
        self.refusal: str | None = None
        """Reason why steps could not be captured."""

    @property
    def sizes(self) -> list[GraphSize]:
        return list(self._steps)

    @property
    def have_adapters(self) -> bool:
        return any(size.has_adapters for size in self._steps)

    def find(
        self, num_rows: int, num_prompt_tokens: int = 0, has_adapters: bool = False
    ) -> CapturedStep | None:
        """Return the smallest step with at least that many rows and prompt tokens, with or without adapters.
        The rest must be idle."""
        for size, step in self._steps.items():
            is_large = size.num_rows >= num_rows and size.num_prompt_tokens >= num_prompt_tokens
            if is_large and size.has_adapters is has_adapters:
                return step
        return None

    def capture(self, sizes: Iterable[GraphSize]) -> None:
        """Capture steps of these sizes: first sizes without adapters, of these first the ones with prompt
        tokens, and in each kind the largest first, because smaller ones reuse its memory. Captures stop after
        10 seconds for prompts, 30 seconds without adapters, and 45 seconds in all; steps of the remaining
        sizes use a larger graph. If one size cannot be captured, its whole kind is dropped. Raises device
        errors other than out of memory."""
        began = self._limits.clock()
        missing = set(sizes) - set(self._steps)
        with _no_garbage_collection():
            for has_adapters, has_prompts, limit in (
                (False, True, MAX_PROMPT_CAPTURE_S),
                (False, False, MAX_CAPTURE_S),
                (True, False, MAX_CAPTURE_S + MAX_ADAPTER_CAPTURE_S),
                (True, True, MAX_CAPTURE_S + MAX_ADAPTER_CAPTURE_S),
            ):
                kind = [size for size in missing if _kind_of(size) == (has_adapters, has_prompts)]
                kind.sort(key=lambda size: (size.num_tokens, size), reverse=True)  # the same on all ranks
                self._capture_kind(kind, began + limit)
            if self._proposals is not None:
                plain = [size.num_rows for size in self._steps if _kind_of(size) == (False, False)]
                self._proposals.capture(plain)
        self._steps = dict(sorted(self._steps.items(), key=lambda item: item[0].num_tokens))

    def _capture_kind(self, sizes: Sequence[GraphSize], end: float) -> None:
        began = self._limits.clock()
        before = self._limits.memory_left()
        for done, size in enumerate(sizes):
            if not self._limits.agree(self._limits.clock() < end):
                used = before - self._limits.memory_left()
                logger.warning(
                    "steps of %s and fewer use larger CUDA graphs: %d graphs took %.0f s and %.0f MiB",
                    size,
                    done,
                    self._limits.clock() - began,
                    used / 2**20,
                )
                break
            if not self._add(size):
                break

    def clear(self) -> None:
        """Drop all graphs. Their memory becomes free when the device's cached memory is released."""
        self._steps = {}
        if self._proposals is not None:
            self._proposals.clear()

    def _add(self, size: GraphSize) -> bool:
        """Capture a step. Log a warning and return False if no further step of its kind can be captured."""
        step, outcome, reason = self._try(size)
        agreed = self._limits.agree(outcome)
        if agreed < outcome:
            reason = "another rank cannot capture them"
        if agreed == _Outcome.CAPTURED:
            assert step is not None
            self._steps[size] = step
            return True
        if agreed == _Outcome.FAILED and -self._limits.agree(-int(self._simplify())):
            logger.warning(
                "kernels start one by one, because steps of %s cannot be captured otherwise: %s", size, reason
            )
            return self._add(size)
        self.refusal = reason
        if agreed == _Outcome.OUT_OF_MEMORY:
            logger.warning("no memory for CUDA graphs of steps of %s: smaller steps use larger graphs", size)
        else:
            logger.warning("no CUDA graphs: steps of %s cannot be captured: %s", size, reason)
            self._drop_kind(size)
        return False

    def _try(self, size: GraphSize) -> "tuple[CapturedStep | None, _Outcome, str]":
        """Capture a step. Return it, the outcome, and the reason of a failure."""
        parts = self._make_parts(size)
        try:
            forward = self._stream.capture(parts.forward)
            sample = self._stream.capture(parts.sample)
            sample_detailed = self._stream.capture(parts.sample_detailed)
            sample_next = self._capture_next(parts) if self._has_drafts else None
        except torch.OutOfMemoryError:
            return None, _Outcome.OUT_OF_MEMORY, "out of memory"
        except RuntimeError as error:
            return None, _Outcome.FAILED, first_line(error)
        step = CapturedStep(size, forward, sample, sample_detailed, sample_next, parts)
        return step, _Outcome.CAPTURED, ""

    def _capture_next(self, parts: StepParts) -> tuple[Graph, Graph]:
        return self._stream.capture(parts.sample_next), self._stream.capture(parts.sample_next_detailed)

    def _drop_kind(self, like: GraphSize) -> None:
        kept = [size for size in self._steps if _kind_of(size) != _kind_of(like)]
        self._steps = {size: self._steps[size] for size in kept}


def _kind_of(size: GraphSize) -> tuple[bool, bool]:
    return size.has_adapters, size.num_prompt_tokens > 0
