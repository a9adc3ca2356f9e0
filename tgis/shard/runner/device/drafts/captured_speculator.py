"""Draft proposer by a speculator that keeps nothing between steps, whose proposals are captured."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tgis.shard.runner.device.device_table import DeviceTable
from tgis.shard.runner.device.drafts.proposal_graphs import MAX_CAPTURED_ROWS, ProposalGraphs
from tgis.shard.runner.device.stream import DeviceStream
from tgis.shard.runner.device.uploads import PinnedRing, Uploads, copy_numbers
from tgis.shard.runner.proposers.speculator import SpeculatorProposer
from tgis.shard.runner.row_table import Integers, TokenIds
from tgis.shard.speculators.interface import Speculator


class CapturedSpeculator(SpeculatorProposer):
    """`SpeculatorProposer` that replays proposals for few rows as CUDA graphs. One upload has the rows and
    their last tokens, and one copy the drafts."""

    def __init__(
        self,
        speculator: Speculator,
        width: int,
        stream: DeviceStream,
        agree: Callable[[int], int],
        table: DeviceTable,
    ) -> None:
        super().__init__(speculator, width, table, num_idle=1)
        self._stream = stream
        self._idle_row = len(table.rows)
        self.graphs = ProposalGraphs(stream, self._propose, speculator.num_tokens, self._idle_row, agree)
        self._uploads = Uploads(stream, self.graphs.inputs.numel())
        self._slots = PinnedRing(stream, MAX_CAPTURED_ROWS * speculator.num_tokens)

    def _draft(self, rows: Integers, token_ids: TokenIds, num_tokens: int) -> TokenIds:
        proposal = self.graphs.find(len(rows), num_tokens)
        if proposal is None:
            return super()._draft(rows, token_ids, num_tokens)
        inputs = np.zeros((2, MAX_CAPTURED_ROWS), np.int32)
        inputs[0] = self._idle_row
        inputs[:, : len(rows)] = rows, token_ids
        self._uploads.send_to(self.graphs.inputs.view(-1), [inputs])
        proposal.graph.replay()
        drafts = proposal.drafts.view(-1)
        slot = self._slots.take(len(drafts))
        target = slot.memory[: len(drafts)]
        self._stream.run(lambda: copy_numbers(drafts, target))
        slot.last_use = self._stream.record()
        slot.last_use.wait()
        copied: TokenIds = target.view(proposal.drafts.shape).numpy()[: len(rows)].copy()
        return copied

    def _propose(self, rows: Tensor, token_ids: Tensor, num_tokens: int) -> Tensor:
        with torch.inference_mode():
            return self._speculator.propose(self._states[rows], token_ids, num_tokens)
