"""Queues the sampling of steps, with the grammar masks and green lists of their rows."""

import numpy as np

from tgis.pb import shard_pb2 as pb
from tgis.shard.runner.batch_builder import Work
from tgis.shard.runner.device.device_table import DeviceTable, SampledRows
from tgis.shard.runner.device.sampling.mask_uploads import MaskUploads
from tgis.shard.runner.device.step_queue import QueuedStep
from tgis.shard.runner.device.uploads import Words
from tgis.shard.runner.row_table import Integers
from tgis.shard.runner.step_response import Problem
from tgis.shard.sampling.grammar import DraftMasks, Guides
from tgis.shard.sampling.watermark import pack_green


class SamplingQueue:
    def __init__(self, table: DeviceTable, guides: Guides, uploads: MaskUploads) -> None:
        self._table = table
        self._guides = guides
        self._guides.unpacks_masks = False
        self._uploads = uploads

    def start_masking(self, work: Work) -> DraftMasks | None:
        """Start to compute the grammar masks after the drafts of a step. Return None if it has none."""
        if work.drafts is None:
            return None
        drafts = dict[int, list[int]]()
        at = np.flatnonzero(work.drafts >= 0)
        for row, token_id in zip(work.sampled_rows[at].tolist(), work.drafts[at].tolist(), strict=True):
            drafts.setdefault(row, []).append(token_id)
        return self._guides.start_masking(drafts)

    def find_masked(self, rows: Integers) -> Integers:
        """Return the rows that have a grammar or a watermark."""
        return rows[self._guides.has_guide(rows) | self._table.is_marked[rows]]

    def send_masks(self, masked: Integers) -> list[Problem]:
        """Send the masks of rows for their next tokens. All earlier tokens must be known. Return the problems
        of rows that cannot be served."""
        live = masked[~self._table.ended[masked]]
        self._send_greens(live[self._table.is_marked[live]])
        return self._send_grammar_masks(live[self._guides.has_guide(live)])

    def queue(
        self, sampled: SampledRows, step: QueuedStep, draft_masks: DraftMasks | None, is_detailed: bool
    ) -> None:
        """Queue a step's sampling, and then a round for each draft of the row with the most drafts."""
        step.sample(is_detailed)
        if draft_masks is None:
            return
        greens = self._uploads.send_green_rounds(self._list_greens(sampled))
        masks = self._uploads.send_rounds(draft_masks())
        for number in range(sampled.num_drafts):
            for queue in (*greens[number : number + 1], *masks[number : number + 1]):
                queue()
            step.sample_next(is_detailed)

    def _send_greens(self, rows: Integers) -> None:
        if len(rows):
            self._uploads.send_greens(rows, self._draw_greens(rows, self._table.lengths[rows]))

    def _list_greens(self, sampled: SampledRows) -> list[tuple[Integers, Words]]:
        """Return for each further round its rows with a watermark, and their green lists."""
        assert sampled.rounds is not None
        is_marked = self._table.is_marked[sampled.rows]
        rounds = sampled.rounds[is_marked]
        rows = sampled.rows[is_marked]
        positions = sampled.positions[is_marked]
        last = int(rounds.max(initial=0))
        parts = [rounds == number for number in range(1, last + 1)]
        return [(rows[at], self._draw_greens(rows[at], positions[at])) for at in parts]

    def _draw_greens(self, rows: Integers, positions: Integers) -> Words:
        """Return the green lists of the rows' tokens at these positions, after the token or draft before."""
        table = self._table
        previous = table.token_ids[rows, positions - 1]
        return pack_green(previous, table.rows["watermark_gamma"][rows], table.limits.vocab_size)

    def _send_grammar_masks(self, live: Integers) -> list[Problem]:
        if not len(live):
            return []
        masks, problems = self._guides.pack_masks(live)
        failed = live[list(problems)]
        self._uploads.send(live[masks.at], masks, failed)
        self._table.fail(failed)
        return [Problem(int(live[i]), text, pb.RowError.CAUSE_GRAMMAR) for i, text in problems.items()]
