"""Captures the proposals of a speculator that keeps no cache as CUDA graphs, by number of rows and drafts."""

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tgis.errors import first_line
from tgis.shard.runner.device.stream import DeviceStream, Graph

logger = logging.getLogger(__name__)

# Maximum number of rows in a graph. Proposals for more rows keep the device busy without one.
MAX_CAPTURED_ROWS = 64

Propose = Callable[[Tensor, Tensor, int], Tensor]
"""Function that returns drafts, int64 [n, num_tokens], of rows and their last tokens, both int64 [n]."""


class Proposal(NamedTuple):
    """Captured proposal."""

    num_rows: int
    graph: Graph
    drafts: Tensor  # int32 [num_rows, num_tokens]
    work: Callable[[], None]  # kept because the graph uses its memory


class ProposalGraphs:
    """Captured proposals, which read rows and tokens from the same memory. They propose up to `num_tokens`
    drafts. All ranks have the same graphs; `agree` returns the smallest of the ranks' values."""

    def __init__(
        self,
        stream: DeviceStream,
        propose: Propose,
        num_tokens: int,
        idle_row: int,
        agree: Callable[[int], int] = lambda value: value,
    ) -> None:
        self._stream = stream
        self._propose = propose
        self._num_tokens = num_tokens
        self._idle_row = idle_row
        self._agree = agree
        self._captured = dict[tuple[int, int], Proposal]()  # by number of rows and of drafts
        self.inputs = torch.zeros(2, MAX_CAPTURED_ROWS, dtype=torch.int32, device=stream.device)
        """Rows, and their last tokens."""

    def find(self, num_rows: int, num_tokens: int) -> Proposal | None:
        """Return the smallest proposal for at least that many rows, with that number of drafts."""
        sizes = (size for size, count in self._captured if count == num_tokens and size >= num_rows)
        size = min(sizes, default=None)
        return None if size is None else self._captured[size, num_tokens]

    def capture(self, sizes: Iterable[int]) -> None:
        """Capture proposals for these numbers of rows, the largest first. If one cannot be captured, log a
        warning and capture no more."""
        for size in sorted({min(size, MAX_CAPTURED_ROWS) for size in sizes}, reverse=True):
            for count in range(1, self._num_tokens + 1):
                if (size, count) not in self._captured and not self._add(size, count):
                    return

    def clear(self) -> None:
        self._captured = {}

    def _add(self, num_rows: int, num_tokens: int) -> bool:
        self.inputs[0].fill_(self._idle_row)
        self.inputs[1].zero_()
        rows, token_ids = self.inputs[:, :num_rows]
        drafts = torch.zeros(num_rows, num_tokens, dtype=torch.int32, device=self._stream.device)

        @torch.inference_mode()
        def work() -> None:
            drafts.copy_(self._propose(rows.long(), token_ids.long(), num_tokens))

        reason = "another rank cannot capture them"
        proposal = None
        try:
            proposal = Proposal(num_rows, self._stream.capture(work), drafts, work)
        except RuntimeError as error:  # also if the device is out of memory
            reason = first_line(error)
        if not self._agree(int(proposal is not None)) or proposal is None:
            logger.warning("proposals of the speculator for %d rows have no CUDA graph: %s", num_rows, reason)
            return False
        self._captured[num_rows, num_tokens] = proposal
        return True
