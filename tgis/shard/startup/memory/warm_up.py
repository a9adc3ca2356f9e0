"""Runs steps before the first request to compile kernels and to measure the memory of the largest step."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tgis.logs import FIELDS
from tgis.pb import shard_pb2 as pb
from tgis.shard.collectives import ProcessGroup
from tgis.shard.memory.host_limits import HostMemory
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.memory.memory_plan import GIB, Demand
from tgis.shard.startup.platforms.interface import Memory

logger = logging.getLogger(__name__)

COMPILED_TOKENS = 20
FIRST_TOKENS = 32
GROWTH = 4
# After two steps, no step runs that is expected to take longer than this.
MAX_STEP_S = 0.5


class RowOptions(NamedTuple):
    """Sampling parameters and token details of a warm-up row."""

    sampling: pb.Sampling
    details: pb.Details


# Options that use the most memory.
ALL = RowOptions(
    pb.Sampling(temperature=1, top_p=0.95, typical_p=0.95, repetition_penalty=1.1, length_penalty_factor=1),
    pb.Details(logprobs=True, ranks=True, top_n=10),
)
# The same, with more top tokens than a GPU lists: the host samples, which uses more of the GPU's memory.
MOST = RowOptions(ALL.sampling, pb.Details(logprobs=True, ranks=True, top_n=100))
# Options that a GPU samples without token details.
PLAIN = RowOptions(pb.Sampling(temperature=1), pb.Details())


@dataclass(frozen=True)
class StepSize:
    num_rows: int  # each row samples one token
    num_tokens: int  # total over all rows


@dataclass(frozen=True)
class WarmUp:
    """Warm-up steps. Their results are meaningless, because all rows share the cache's first block."""

    runner: ModelRunner
    group: ProcessGroup
    demand: Demand
    memory: Memory = field(default_factory=HostMemory)

    def compile(self, options: RowOptions = ALL) -> None:
        """Run a prompt in two chunks, generate a token, and propose drafts if there is a speculator, so that
        no request waits for a compiler.

        Raises ProcessGroupError and UnsupportedModelError."""
        num_tokens = min(COMPILED_TOKENS, self.demand.max_sequence_length - 1)
        opened = self._open_rows(StepSize(1, num_tokens), options)
        length = opened[0].prompt_len
        num_drafts = min(self.runner.info.max_drafts, self.demand.max_sequence_length - length - 2)
        if num_drafts > 0:
            opened[0].max_new_tokens = num_drafts + 2
        steps = [
            self._step(opened if start == 0 else [], [start], [end])
            for start, end in pairwise(sorted({0, length - 1, length}))
        ]
        if num_drafts > 0:
            steps.append(self._step([], [length], [length + 1], num_drafts))
        problems = [error.message for step in steps for error in self.runner.launch(step).answer().errors]
        self.runner.reset()
        if self.group.min(-len(problems)):  # only rank 0's response lists the problems
            raise UnsupportedModelError(
                f"the model failed a warm-up step: {problems[0] if problems else 'see the log of rank 0'}"
            )

    def measure(self, largest: StepSize, is_enough: Callable[[int], bool], left: int) -> int:
        """Return the bytes that a rank needs for the largest step, in addition to weights and cache: the
        maximum over the ranks.

        Run steps of increasing size until an upper bound satisfies `is_enough`, or the next step would be
        slow or exceed the `left` bytes; then extrapolate. Raises ProcessGroupError."""
        began = time.monotonic()
        seconds = 0.0
        used: dict[int, int] = {}
        for size in _rising_sizes(largest):
            next_bytes = extrapolate(used, size.num_tokens) if used else 0
            is_slow = len(used) > 1 and seconds * GROWTH > MAX_STEP_S
            if is_slow or next_bytes * self.group.size > left:
                break
            seconds, used[size.num_tokens] = self._run(size)
            if is_enough(used[size.num_tokens] * largest.num_tokens // size.num_tokens):
                break
        step_bytes = extrapolate(used, largest.num_tokens)
        _log(time.monotonic() - began, max(used), largest, step_bytes)
        return step_bytes

    def measure_largest(self, largest: StepSize) -> int:
        """Run the largest step. Return the bytes that a rank needs for it, in addition to weights and cache:
        the maximum over the ranks. Raises ProcessGroupError."""
        seconds, used = self._run(largest, MOST)
        _log(seconds, largest.num_tokens, largest, used)
        return used

    def _run(self, size: StepSize, options: RowOptions = ALL) -> tuple[float, int]:
        """Run a step. Return its duration in seconds and its memory in bytes, each the maximum over the
        ranks."""
        self.memory.release_memory()
        before = self.memory.begin_peak()
        began = time.monotonic()
        opened = self._open_rows(size, options)
        step = self._step(opened, [0] * len(opened), [row.prompt_len for row in opened])
        self.runner.launch(step).answer()
        self.runner.reset()
        seconds = time.monotonic() - began
        used = max(0, self.memory.peak() - before)
        return -self.group.min(-int(seconds * 1e6)) / 1e6, -self.group.min(-used)

    def _open_rows(self, size: StepSize, options: RowOptions = ALL) -> list[pb.OpenRow]:
        each, rest = divmod(size.num_tokens, size.num_rows)
        return [self._open_row(row, each + (row < rest), options) for row in range(size.num_rows)]

    def _open_row(self, row: int, length: int, options: RowOptions) -> pb.OpenRow:
        prompt_len = 1 if self.demand.is_encoder_decoder else length
        opened = pb.OpenRow(
            row=row,
            token_ids=_column([0] * prompt_len),
            prompt_len=prompt_len,
            max_new_tokens=1,
            sampling=options.sampling,
            details=options.details,
        )
        if self.demand.is_encoder_decoder:
            opened.encoder_token_ids = _column([0] * length)
            opened.cross_blocks = _column([0] * self._num_blocks(length))
        return opened

    def _step(
        self, opened: list[pb.OpenRow], starts: list[int], ends: list[int], num_drafts: int = 0
    ) -> pb.StepRequest:
        pairs = zip(starts, ends, strict=True)
        new_blocks = [self._num_blocks(end + num_drafts) - self._num_blocks(start) for start, end in pairs]
        return pb.StepRequest(
            opened_rows=opened,
            rows=_column(range(len(ends))),
            starts=_column(starts),
            ends=_column(ends),
            num_new_blocks=_column(new_blocks),
            new_blocks=_column([0] * sum(new_blocks)),
            max_drafts=_column([num_drafts] * len(ends) if num_drafts else []),
            followed=bytes([1] * len(ends)),
        )

    def _num_blocks(self, length: int) -> int:
        return -(-length // self.demand.block_size)


def largest_step(demand: Demand, max_step_tokens: int) -> StepSize:
    """Return the size of the largest step that the router can send."""
    longest = demand.max_sequence_length - 1
    num_rows = min(demand.max_batch_size, max_step_tokens)
    num_tokens = min(max_step_tokens, num_rows * longest)
    if demand.is_encoder_decoder:  # an encoder's input is not chunked
        num_tokens = max(num_tokens, longest)
    return StepSize(num_rows, num_tokens)


def extrapolate(used: dict[int, int], num_tokens: int) -> int:
    """Extrapolate the memory `used`, in bytes by ascending number of tokens, linearly from the last two
    points or from zero."""
    if num_tokens in used:
        return used[num_tokens]
    (x1, y1), (x2, y2) = [(0, 0), *used.items()][-2:]
    return y2 + max(0, y2 - y1) * (num_tokens - x2) // (x2 - x1)


def _log(seconds: float, num_tokens: int, largest: StepSize, step_bytes: int) -> None:
    fields = {
        "seconds": round(seconds, 1),
        "tokens": num_tokens,
        "largest_step_tokens": largest.num_tokens,
        "largest_step_gib": round(step_bytes / GIB, 3),
    }
    logger.info("warmed up", extra={FIELDS: fields})


def _rising_sizes(largest: StepSize) -> Iterator[StepSize]:
    """Yield steps of increasing size and the same shape, up to the largest."""
    num_tokens = FIRST_TOKENS
    while num_tokens < largest.num_tokens:
        yield StepSize(-(-largest.num_rows * num_tokens // largest.num_tokens), num_tokens)
        num_tokens *= GROWTH
    yield largest


def _column(values: Sequence[int]) -> bytes:
    return np.array(values, "<i4").tobytes()
