"""Begins a step on the device: reads the rows' state, and writes what the model's kernels read."""

import torch

from tgis.shard.kernels.cuda.step_state import RowState, StagedStep, StepTensors, Word, count_segments


def launch(staged: StagedStep, rows: RowState, out: StepTensors) -> None:
    """Append the new blocks to the rows' tables and write all of `out`."""
    raise NotImplementedError


def plain(staged: StagedStep, rows: RowState, out: StepTensors) -> None:
    owner, place, block = staged.new_blocks.long().unbind(1)
    rows.block_tables[owner, place] = block.int()
    words = rows.words[staged.token_rows.long()]  # [num_tokens, len(Word)]
    has_ended = words[:, Word.ENDED] != 0
    out.token_ids.copy_(torch.where(staged.token_ids < 0, words[:, Word.LAST_TOKEN], staged.token_ids))
    out.positions.copy_(staged.positions)
    out.slot_mapping.copy_(torch.where(has_ended, rows.dummy_slot, staged.slots))
    out.is_long.copy_(words[:, Word.IS_LONG] != 0)
    words = rows.words[staged.seq_rows.long()]  # [num_seqs, len(Word)]
    is_live = words[:, Word.ENDED] == 0
    out.seq_lens.copy_(staged.seq_ends * is_live)
    out.cross_lens.copy_(words[:, Word.ENCODER_LEN] * is_live)
    for starts, seq_lens in ((out.work_starts, out.seq_lens), (out.cross_work_starts, out.cross_lens)):
        starts[:1] = 0
        starts[1:] = count_segments(seq_lens[: len(starts) - 1]).cumsum(0)
