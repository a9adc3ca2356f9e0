"""Stores the newest inputs of recurrent layers in the states: windows of the convolution, and what is
pending. It runs after all kernels that read older inputs."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgis.shard.kernels.cuda.states.chunks import CHUNK, SPAN_NAMES, Spans, StateMemory, load_span
from tgis.shard.kernels.cuda.step_state import STATE_CHUNK

CHANNELS, NUM_WARPS = 128, 4


class HeadInputs(NamedTuple):
    """Inputs of each head other than channels."""

    rows: Tensor  # contiguous [num_tokens, any]
    columns: tuple[int, ...]  # first column of each kind of input, one or two kinds
    num_heads: int


@triton.jit
def _move_window(
    rows, windows, begin, count, column, channel, is_channel, ROW_SIZE, WIDTH, BEFORE: tl.constexpr
):
    i = tl.arange(0, triton.next_power_of_2(BEFORE))
    source = count - BEFORE + i
    is_row = (i < BEFORE)[:, None] & is_channel[None, :]
    fresh = tl.load(
        rows + (begin + source)[:, None] * ROW_SIZE + (column + channel)[None, :],
        mask=is_row & (source >= 0)[:, None],
        other=0.0,
    ).to(tl.float32)
    old = windows + (BEFORE + source)[:, None] * WIDTH + channel[None, :]
    kept = tl.load(old, mask=is_row & (source < 0)[:, None], other=0.0)
    tl.debug_barrier()  # another thread writes the row that this one reads
    tl.store(windows + i[:, None] * WIDTH + channel[None, :], fresh + kept, mask=is_row)


@triton.jit(do_not_specialize_on_alignment=SPAN_NAMES)
def keep_inputs_kernel(
    rows,
    channels,
    heads,
    windows,
    pending,
    slots,
    begins,
    starts,
    windows_stride,
    pending_stride,
    ROW_SIZE: tl.constexpr,
    COLUMN: tl.constexpr,
    HEADS_SIZE: tl.constexpr,
    ONE: tl.constexpr,
    OTHER: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    BEFORE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Store CHANNELS channels of a sequence; the last program of a sequence stores the inputs of heads."""
    begin, count, start, slot = load_span(slots, begins, starts)
    windows += slot * windows_stride
    pending += slot * pending_stride
    if count <= 0:
        return
    end = start + count
    first = end // CHUNK * CHUNK
    place = tl.arange(0, CHUNK)
    is_new = (first + place >= start) & (first + place < end)
    at = begin - start + first + place
    if tl.program_id(1) < tl.num_programs(1) - 1:
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        is_channel = channel < NUM_CHANNELS
        _move_window(rows, windows, begin, count, COLUMN, channel, is_channel, ROW_SIZE, NUM_CHANNELS, BEFORE)
        mask = is_new[:, None] & is_channel[None, :]
        x = tl.load(channels + at[:, None] * NUM_CHANNELS + channel[None, :], mask=mask, other=0.0)
        tl.store(pending + place[:, None] * WIDTH + channel[None, :], x, mask=mask)
    else:
        head = tl.arange(0, triton.next_power_of_2(NUM_HEADS))
        is_input = is_new[:, None] & (head < NUM_HEADS)[None, :]
        target = pending + place[:, None] * WIDTH + NUM_CHANNELS + head[None, :]
        source = heads + at[:, None] * HEADS_SIZE + head[None, :]
        tl.store(target, tl.load(source + ONE, mask=is_input, other=0.0).to(tl.float32), mask=is_input)
        if OTHER is not None:
            other = tl.load(source + OTHER, mask=is_input, other=0.0).to(tl.float32)
            tl.store(target + NUM_HEADS, other, mask=is_input)


def launch(
    rows: Tensor, column: int, channels: Tensor, heads: HeadInputs, memory: StateMemory, spans: Spans
) -> None:
    """Store the newest of new inputs. rows, column: as in `convolve.launch`, whose result is `channels`."""
    num_seqs = len(spans.slots)
    num_channels = channels.shape[1]
    keep_inputs_kernel[num_seqs, triton.cdiv(num_channels, CHANNELS) + 1](
        rows,
        channels,
        heads.rows,
        memory.windows,
        memory.pending,
        *spans,
        memory.windows.stride(0),
        memory.pending.stride(0),
        ROW_SIZE=rows.shape[1],
        COLUMN=column,
        HEADS_SIZE=heads.rows.shape[1],
        ONE=heads.columns[0],
        OTHER=heads.columns[1] if len(heads.columns) > 1 else None,
        NUM_HEADS=heads.num_heads,
        NUM_CHANNELS=num_channels,
        BEFORE=memory.windows.shape[1],
        WIDTH=memory.pending.shape[2],
        CHANNELS=CHANNELS,
        num_warps=NUM_WARPS,
    )


def plain(
    rows: Tensor, column: int, channels: Tensor, heads: HeadInputs, memory: StateMemory, spans: Spans
) -> None:
    slots, begins, starts = (each.long() for each in spans)
    num_channels = channels.shape[1]
    before = memory.windows.shape[1]
    counts = begins.diff()
    is_live = (counts > 0).view(-1, 1, 1)
    source = counts.unsqueeze(1) - before + torch.arange(before, device=rows.device)  # [num_seqs, before]
    old = memory.windows[slots]
    kept = old.gather(1, (before + source).clamp(max=before - 1).unsqueeze(2).expand(old.shape))
    at = (begins[:-1].unsqueeze(1) + source).clamp(0, len(rows) - 1)
    fresh = rows[:, column : column + num_channels][at].float()
    memory.windows[slots] = torch.where(is_live, torch.where(source.unsqueeze(2) < 0, kept, fresh), old)

    ends = starts + counts
    place = torch.arange(STATE_CHUNK, device=rows.device)
    positions = (torch.div(ends, STATE_CHUNK, rounding_mode="floor") * STATE_CHUNK).unsqueeze(1) + place
    is_new = (positions >= starts.unsqueeze(1)) & (positions < ends.unsqueeze(1))
    at = ((begins[:-1] - starts).unsqueeze(1) + positions).clamp(0, len(rows) - 1)
    parts = [heads.rows[:, first : first + heads.num_heads].float() for first in heads.columns]
    inputs = torch.cat([channels, *parts], 1)
    old = memory.pending[slots]
    width = inputs.shape[1]
    new = torch.where(is_new.unsqueeze(2), inputs[at], old[:, :, :width])
    memory.pending[slots] = torch.cat([new, old[:, :, width:]], 2)
