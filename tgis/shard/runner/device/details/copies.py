"""Token details that a device computes and copies to the host with the answers of a step."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from tgis.pb import shard_pb2 as pb
from tgis.shard.kernels.cuda.step_state import DeviceDetails
from tgis.shard.runner import step_response
from tgis.shard.runner.device.device_table import DeviceTable
from tgis.shard.runner.device.stream import DeviceStream
from tgis.shard.runner.device.uploads import PinnedRing, Words, copy_numbers, place_arrays
from tgis.shard.runner.row_table import Booleans, Integers
from tgis.shard.runner.step_response import SampledDetails
from tgis.shard.sampling.logprobs import InputSpan, TokenDetails, blank_details, concatenate


class CopiedDetails(NamedTuple):
    """`DeviceDetails` in pinned memory, valid once the device has copied them."""

    words: Words
    logprobs: npt.NDArray[np.float32]

    @classmethod
    def view(cls, memory: Words, begins: Sequence[int], details: DeviceDetails) -> Self:
        words, logprobs = (
            memory[begin : begin + part.numel()].reshape(part.shape)
            for begin, part in zip(begins, details, strict=True)
        )
        return cls(words, logprobs.view(np.float32))

    def read(self, at: Integers | slice = slice(None)) -> TokenDetails:
        """Return the details of the tokens at these indices, as `compute_details` does."""
        words = self.words[at]
        logprobs = self.logprobs[at]
        counts = words[:, 1].copy()
        is_top = np.arange(logprobs.shape[1] - 1) < counts[:, None]
        owner = is_top.nonzero()[0]
        ids = words[:, 2:][is_top]
        best = logprobs[:, 1:][is_top]
        order = np.lexsort((ids, -best, owner))
        return TokenDetails(logprobs[:, 0].copy(), words[:, 0].copy(), counts, ids[order], best[order])


class PendingDetails(NamedTuple):
    """Details that a launched step reports."""

    wants_details: Booleans  # [num_sampled]
    wanted: npt.NDArray[np.void]  # [num_sampled], as in `Traits`
    inputs: list[tuple[InputSpan, CopiedDetails | None]]  # None if only the ids are wanted
    sampled: CopiedDetails | None  # None if no row that samples wants details

    def describe(self, kept: Integers, at: Integers) -> SampledDetails | None:
        """Return the details of the samples `kept` [n]. `at` [num_sampled] has the indices of all samples in
        `sampled`."""
        is_detailed = self.wants_details[kept]
        if self.sampled is None or not is_detailed.any():
            return None
        detailed = kept[is_detailed]
        return SampledDetails(
            self.wanted[detailed], is_detailed.nonzero()[0], self.sampled.read(at[detailed])
        )

    def write_inputs(self, response: pb.StepResponse) -> None:
        for span, copied in self.inputs:
            details = None
            if copied is not None:
                read = copied.read()
                details = concatenate([blank_details(len(span.token_ids) - len(read.ranks)), read])
            step_response.write_input(response, span, details)


class DetailCopies:
    """Copies the details of steps to pinned memory, one slot for each step."""

    def __init__(self, table: DeviceTable, stream: DeviceStream, num_words: int):
        self._table = table
        self._stream = stream
        self._slots = PinnedRing(stream, num_words)

    def queue(
        self,
        inputs: Sequence[tuple[InputSpan, DeviceDetails | None]],
        rows: Integers,
        sampled: DeviceDetails | None,
    ) -> PendingDetails:
        """Queue the copies of the details of prompt tokens, and of the tokens of the rows that sample, if any
        of them wants details."""
        given = [part for part in (*(part for _, part in inputs), sampled) if part is not None]
        copied = iter(self._copy(given) if given else ())
        return PendingDetails(
            self._table.wants_details[rows],
            self._table.rows[["logprobs", "ranks", "top_n"]][rows],
            inputs=[(span, part and next(copied)) for span, part in inputs],
            sampled=sampled and next(copied),
        )

    def _copy(self, parts: Sequence[DeviceDetails]) -> list[CopiedDetails]:
        tensors = [tensor for part in parts for tensor in part]
        begins, num_words = place_arrays([tensor.numel() for tensor in tensors])
        slot = self._slots.take(num_words)
        for tensor, begin in zip(tensors, begins, strict=True):
            source = tensor.view(torch.int32).view(-1)
            target = slot.memory[begin : begin + len(source)]
            self._stream.run(partial(copy_numbers, source, target))
        slot.last_use = self._stream.record()
        memory = slot.memory.numpy()
        return [CopiedDetails.view(memory, begins[2 * i : 2 * i + 2], part) for i, part in enumerate(parts)]
