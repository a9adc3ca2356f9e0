"""Finds the samples that follow accepted drafts, between two rounds of sampling of a step."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgis.shard.kernels.cuda.functions.row_words import STAGED
from tgis.shard.kernels.cuda.step_state import Flag, RowState, StagedStep

BLOCK, NUM_WARPS = 256, 4

_SAMPLED = tl.constexpr(int(Flag.SAMPLED))


def launch(staged: StagedStep, rows: RowState, answers: Tensor, next_rows: Tensor) -> None:
    """Write the rows that the next round samples, and the idle row for all other samples.

    Two samples are one after the other in a row if their tokens are. The second one is in the next round if
    the first one has been answered with the token of the second one, the draft, and has not ended the row.
    answers: int32 [num_sampled, 2], see `sample`, of all rounds so far; samples without an answer have 0.
    next_rows: int32 [num_sampled]."""
    count = len(staged.sampled_x)
    if not count:
        return
    _accept_drafts[(triton.cdiv(count, BLOCK),)](
        staged.token_rows,
        staged.token_ids,
        staged.sampled_x,
        answers,
        next_rows,
        count,
        rows.idle_row,
        BLOCK,
        num_warps=NUM_WARPS,
    )


def plain(staged: StagedStep, rows: RowState, answers: Tensor, next_rows: Tensor) -> None:
    x = staged.sampled_x.long()
    owners = staged.token_rows[x]
    before = answers.roll(1, 0)
    is_next = (x == x.roll(1) + 1) & (owners == owners.roll(1))
    is_next[:1] = False
    is_accepted = (before[:, 1] == int(Flag.SAMPLED)) & (before[:, 0] == staged.token_ids[x])
    next_rows.copy_(torch.where(is_next & is_accepted & (answers[:, 1] == 0), owners, rows.idle_row))


# One kernel serves all sizes of steps and alignments of tensors, so that no step waits for a compilation.
@triton.jit(
    do_not_specialize=["count", "idle_row"],
    do_not_specialize_on_alignment=["token_rows", "token_ids", "sampled_x", "next_rows", *STAGED],
)
def _accept_drafts(
    token_rows, token_ids, sampled_x, answers, next_rows, count, idle_row, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_own = i < count
    is_second = is_own & (i > 0)
    x = tl.load(sampled_x + i, mask=is_own, other=0)
    before = tl.load(sampled_x + i - 1, mask=is_second, other=0)
    row, row_before = tl.load(token_rows + x), tl.load(token_rows + before)
    is_next = is_second & (x == before + 1) & (row == row_before)
    token_id = tl.load(answers + 2 * i - 2, mask=is_second, other=0)
    flags = tl.load(answers + 2 * i - 1, mask=is_second, other=0)
    is_accepted = (flags == _SAMPLED) & (token_id == tl.load(token_ids + x))
    is_open = tl.load(answers + 2 * i + 1, mask=is_own, other=0) == 0
    tl.store(next_rows + i, tl.where(is_next & is_accepted & is_open, row, idle_row), mask=is_own)
