"""Begins a step on the device: reads the state of rows and writes the inputs of the model's kernels."""

import torch
import triton
import triton.language as tl

from tgis.shard.kernels.cuda.step_state import (
    MAX_SEGMENTS,
    SEGMENT_LEN,
    RowState,
    StagedStep,
    StepTensors,
    Word,
    count_segments,
)

# Items per program. Programs 0 and 1 loop over all sequences; the next programs handle tokens, the last ones
# new blocks.
SEQS, TOKENS, BLOCKS = 1024, 256, 256
NUM_WARPS = 4

_SEQS, _TOKENS, _BLOCKS = tl.constexpr(SEQS), tl.constexpr(TOKENS), tl.constexpr(BLOCKS)
_SEGMENT_LEN = tl.constexpr(SEGMENT_LEN)
_LONGEST = tl.constexpr(SEGMENT_LEN * MAX_SEGMENTS)
_ENDED = tl.constexpr(int(Word.ENDED))
_LAST_TOKEN = tl.constexpr(int(Word.LAST_TOKEN))
_ENCODER_LEN = tl.constexpr(int(Word.ENCODER_LEN))
_IS_LONG = tl.constexpr(int(Word.IS_LONG))


def launch(staged: StagedStep, rows: RowState, out: StepTensors) -> None:
    """Append the new blocks to the rows' tables and write all of `out`."""
    sizes = len(staged.seq_rows), len(out.work_starts) - 1, len(staged.token_rows), len(staged.new_blocks)
    num_programs = 2 + triton.cdiv(sizes[2], TOKENS) + triton.cdiv(sizes[3], BLOCKS)
    _begin_step[(num_programs,)](
        *staged[:7],
        rows.words,
        rows.block_tables,
        *out,
        *sizes,
        rows.words.stride(0),
        rows.block_tables.stride(0),
        rows.dummy_slot,
        num_warps=NUM_WARPS,
    )


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


@triton.jit
def _write_lengths(
    seq_rows,
    seq_ends,
    words,
    words_stride,
    seq_lens,
    work_starts,
    num_seqs,
    num_single,
    IS_CROSS: tl.constexpr,
):
    total = 0
    for first in range(0, num_seqs, _SEQS):
        seq = first + tl.arange(0, _SEQS)
        is_seq = seq < num_seqs
        word = words + tl.load(seq_rows + seq, mask=is_seq, other=0).to(tl.int64) * words_stride
        ends = word + _ENCODER_LEN if IS_CROSS else seq_ends + seq
        is_live = tl.load(word + _ENDED, mask=is_seq, other=0) == 0
        seq_len = tl.where(is_live, tl.load(ends, mask=is_seq, other=0), 0)
        tl.store(seq_lens + seq, seq_len, mask=is_seq)
        segment_len = _SEGMENT_LEN * tl.maximum(tl.cdiv(seq_len, _LONGEST), 1)
        num_segments = tl.cdiv(seq_len, segment_len)
        tl.store(work_starts + 1 + seq, total + tl.cumsum(num_segments), mask=seq < num_single)
        total += tl.sum(num_segments)
    tl.store(work_starts, 0)


@triton.jit
def _append_blocks(new_blocks, block_tables, tables_stride, program, num_new_blocks):
    i = program * _BLOCKS + tl.arange(0, _BLOCKS)
    is_new = i < num_new_blocks
    row = tl.load(new_blocks + 3 * i, mask=is_new, other=0).to(tl.int64)
    place = tl.load(new_blocks + 3 * i + 1, mask=is_new)
    block = tl.load(new_blocks + 3 * i + 2, mask=is_new)
    tl.store(block_tables + row * tables_stride + place, block, mask=is_new)


# One kernel serves all sizes of steps and alignments of staged tensors, so that no step waits for a
# compilation.
@triton.jit(do_not_specialize=range(24), do_not_specialize_on_alignment=range(24))
def _begin_step(
    seq_rows,
    seq_ends,
    token_rows,
    staged_ids,
    staged_positions,
    staged_slots,
    new_blocks,
    words,
    block_tables,
    token_ids,
    positions,
    slot_mapping,
    is_long,
    seq_lens,
    work_starts,
    cross_lens,
    cross_work_starts,
    num_seqs,
    num_single,
    num_tokens,
    num_new_blocks,
    words_stride,
    tables_stride,
    dummy_slot,
):
    program = tl.program_id(0)
    num_token_programs = tl.cdiv(num_tokens, _TOKENS)
    if program == 0:
        _write_lengths(
            seq_rows, seq_ends, words, words_stride, seq_lens, work_starts, num_seqs, num_single, False
        )
    elif program == 1:
        _write_lengths(
            seq_rows, seq_ends, words, words_stride, cross_lens, cross_work_starts, num_seqs, num_single, True
        )
    elif program < 2 + num_token_programs:
        token = (program - 2) * _TOKENS + tl.arange(0, _TOKENS)
        is_token = token < num_tokens
        word = words + tl.load(token_rows + token, mask=is_token, other=0).to(tl.int64) * words_stride
        known, last = tl.load(staged_ids + token, mask=is_token), tl.load(word + _LAST_TOKEN, mask=is_token)
        slot, has_ended = tl.load(staged_slots + token, mask=is_token), tl.load(word + _ENDED, mask=is_token)
        tl.store(token_ids + token, tl.where(known < 0, last, known), mask=is_token)
        tl.store(slot_mapping + token, tl.where(has_ended == 0, slot, dummy_slot), mask=is_token)
        tl.store(positions + token, tl.load(staged_positions + token, mask=is_token), mask=is_token)
        tl.store(is_long + token, tl.load(word + _IS_LONG, mask=is_token) != 0, mask=is_token)
    else:
        nth = program - 2 - num_token_programs
        _append_blocks(new_blocks, block_tables, tables_stride, nth, num_new_blocks)
