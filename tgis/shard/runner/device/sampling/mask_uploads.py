"""Uploads grammar masks and green lists to a device, between a step's forward pass and its sampling."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tgis.shard.kernels.cuda.step_state import RowState, Word
from tgis.shard.runner.device.stream import DeviceStream
from tgis.shard.runner.device.uploads import Uploads, Words
from tgis.shard.runner.row_table import Integers
from tgis.shard.sampling.grammar import PackedMasks

_NONE = torch.empty(0, dtype=torch.int32)


class MaskUploads:
    def __init__(self, stream: DeviceStream, state: RowState):
        self._stream = stream
        self._state = state
        self._uploads = Uploads(stream, num_words=state.masks.shape[1] + 64)

    def send_greens(self, rows: Integers, greens: Words) -> None:
        """Queue the upload of the green lists of rows [n], see `RowState.greens`."""
        for queue in self.send_green_rounds([(rows, greens)]):
            queue()

    def send_green_rounds(self, rounds: Sequence[tuple[Integers, Words]]) -> list[Callable[[], None]]:
        """Queue the upload of the green lists of rows for several rounds of sampling. Return for each round a
        function that queues its lists for the rows."""
        if not rounds:
            return []
        sent = self._uploads.send(
            [part for rows, greens in rounds for part in (rows.astype(np.int32), greens)]
        )
        return [partial(self._queue_greens, *sent[i : i + 2]) for i in range(0, len(sent), 2)]

    def send(self, rows: Integers, masks: PackedMasks, failed_rows: Integers) -> None:
        """Queue the upload of the rows' masks [n], and end the rows whose grammar has failed."""
        arrays = [rows, masks.are_complete, masks.words, failed_rows]
        sent = self._uploads.send([np.asarray(array, np.int32) for array in arrays])
        self._stream.run(lambda: _apply(self._state, *sent))

    def send_rounds(self, rounds: Sequence[tuple[Integers, PackedMasks]]) -> list[Callable[[], None]]:
        """Queue the upload of the masks of rows for several rounds of sampling. Return for each round a
        function that queues its masks for the rows."""
        if not rounds:
            return []
        arrays = [
            np.asarray(array, np.int32)
            for rows, masks in rounds
            for array in (rows, masks.are_complete, masks.words)
        ]
        sent = self._uploads.send(arrays)
        parts = [sent[i : i + 3] for i in range(0, len(sent), 3)]
        return [partial(self._queue, *part) for part in parts]

    def _queue_greens(self, rows: Tensor, greens: Tensor) -> None:
        self._stream.run(lambda: _apply_greens(self._state, rows, greens))

    def _queue(self, rows: Tensor, are_complete: Tensor, masks: Tensor) -> None:
        self._stream.run(lambda: _apply(self._state, rows, are_complete, masks, _NONE))


@torch.inference_mode()
def _apply_greens(state: RowState, rows: Tensor, greens: Tensor) -> None:
    state.greens.index_copy_(0, rows.long(), greens)


@torch.inference_mode()
def _apply(state: RowState, rows: Tensor, must_end: Tensor, masks: Tensor, failed_rows: Tensor) -> None:
    if len(rows):
        at = rows.long()
        state.masks.index_copy_(0, at, masks)
        state.words[:, Word.MUST_END].index_copy_(0, at, must_end)
    if len(failed_rows):
        state.words[:, Word.ENDED].index_fill_(0, failed_rows.long(), 1)
