"""Mamba 2's sums, as products of matrices for chunks of tokens (Dao and Gu, 2024)."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tgis.shard.kernels.cuda.states.chunks import (
    CHUNK,
    SPAN_NAMES,
    ScanSizes,
    Spans,
    StateMemory,
    advance,
    find_decays,
    find_sums,
    find_tokens,
    list_chunks,
    load_inputs,
    load_numbers,
    load_slices,
    load_span,
    multiply,
    multiply_rows,
    multiply_state,
    read_sums,
    softplus,
    write_sums,
)
from tgis.shard.layers.states import Mamba2

MAX_DEPTH = 32  # sums of each channel per warp; more do not fit into its registers
NUM_STAGES = 1  # loads of the next chunk before its turn would not fit either


@triton.jit
def _load_times(rows, at, is_new, old, is_old, head, ROW_SIZE: tl.constexpr, SIZES: tl.constexpr):
    column = ROW_SIZE - SIZES.num_heads + head
    old_column = SIZES.num_channels + head
    return load_numbers(rows, at, is_new, ROW_SIZE, column, old, is_old, SIZES.pending_width, old_column)


@triton.jit(do_not_specialize_on_alignment=SPAN_NAMES, do_not_specialize=["min_step", "max_step"])
def scan_mamba_kernel(
    rows,
    channels,
    sums,
    pending,
    slots,
    begins,
    starts,
    sums_stride,
    pending_stride,
    decay,
    time_bias,
    skip,
    min_step,
    max_step,
    y,
    ROW_SIZE: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Compute the new tokens of a sequence for SIZES.columns channels of one head, chunk by chunk."""
    begin, count, start, slot = load_span(slots, begins, starts)
    if count <= 0:
        return
    head = tl.program_id(1)
    width: tl.constexpr = SIZES.num_heads * SIZES.head_dim
    p = tl.program_id(2) * SIZES.columns + tl.arange(0, SIZES.columns)
    left_at = width + head * SIZES.num_groups // SIZES.num_heads * SIZES.state_size
    right_at = left_at + SIZES.num_groups * SIZES.state_size
    x_at = head * SIZES.head_dim + p
    place, is_sum = find_sums(head, p, SIZES)
    state = tl.load(sums + slot * sums_stride + place, mask=is_sum, other=0.0)  # [slices, depth, columns]
    rate, bias, through = tl.load(decay + head), tl.load(time_bias + head), tl.load(skip + head)
    old, end = pending + slot * pending_stride, start + count
    for first in range(start // CHUNK * CHUNK, end, CHUNK):
        at, is_new, is_old = find_tokens(first, begin, start, end)
        step = softplus(_load_times(rows, at, is_new, old, is_old, head, ROW_SIZE, SIZES) + bias)
        step = tl.where(is_new | is_old, tl.minimum(tl.maximum(step, min_step), max_step), 0.0)
        total = tl.cumsum(step * rate, 0)
        x = load_inputs(channels, at, is_new, old, is_old, x_at, p < SIZES.head_dim, SIZES)
        left = load_slices(channels, at, is_new, old, is_old, left_at, SIZES)
        right = load_slices(channels, at, is_new, old, is_old, right_at, SIZES)
        scaled = x * step[:, None]
        result = multiply_state(right, state) * tl.exp(total)[:, None]
        result += multiply(multiply_rows(right, left) * find_decays(total), scaled) + x * through
        is_stored = is_new[:, None] & (p < SIZES.head_dim)[None, :]
        tl.store(y + at[:, None] * width + x_at[None, :], result, mask=is_stored)
        if first + CHUNK <= end:
            state = advance(state, total, left, scaled, SIZES)
    if end // CHUNK > start // CHUNK:
        tl.store(sums + slot * sums_stride + place, state, mask=is_sum)


def launch(rows: Tensor, channels: Tensor, mixer: Mamba2, memory: StateMemory, spans: Spans) -> Tensor:
    """Return y of new tokens, float32 [num_tokens, width], and advance the sums by whole chunks.

    rows: contiguous [num_tokens, any], whose last columns are the heads' time steps. channels: contiguous
    float32 [num_tokens, num_channels], after the convolution. Rows of tokens outside of all spans are
    undefined."""
    sizes = ScanSizes.of(mixer.sizes, MAX_DEPTH)
    y = torch.empty(len(rows), mixer.sizes.width, dtype=torch.float32, device=rows.device)
    scan_mamba_kernel[len(spans.slots), sizes.num_heads, sizes.num_parts](
        rows,
        channels,
        memory.sums,
        memory.pending,
        *spans,
        memory.sums.stride(0),
        memory.pending.stride(0),
        mixer.decay,
        mixer.time_bias,
        mixer.skip,
        mixer.min_step,
        mixer.max_step,
        y,
        ROW_SIZE=rows.shape[1],
        SIZES=sizes,
        num_warps=sizes.slices,
        num_stages=NUM_STAGES,
    )
    return y


def plain(rows: Tensor, channels: Tensor, mixer: Mamba2, memory: StateMemory, spans: Spans) -> Tensor:
    sizes = mixer.sizes
    slots = spans.slots.long()
    pending = memory.pending[slots]
    state = read_sums(memory.sums[slots])  # [num_seqs, num_heads, state_size, head_dim]
    times = rows[:, -sizes.num_heads :]
    old_times = pending[:, :, sizes.num_channels : sizes.num_channels + sizes.num_heads]
    y = channels.new_zeros(len(rows) + 1, sizes.width)
    for chunk in list_chunks(spans, len(rows)):
        inputs = chunk.read(channels, pending[:, :, : sizes.num_channels])
        step = F.softplus(chunk.read(times, old_times) + mixer.time_bias)
        step = step.clamp(mixer.min_step, mixer.max_step) * (chunk.is_new | chunk.is_old).unsqueeze(2)
        result, after = _advance(inputs, step, mixer, state)
        chunk.write(y, result)
        state = torch.where(chunk.is_whole.view(-1, 1, 1, 1), after, state)
    write_sums(state, memory.sums, slots)
    return y[:-1]


def _advance(inputs: Tensor, step: Tensor, mixer: Mamba2, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return y of a chunk, [num_seqs, CHUNK, width], and the state after it. inputs: [num_seqs, CHUNK,
    num_channels]; step: [num_seqs, CHUNK, num_heads]."""
    sizes = mixer.sizes
    x, left, right = torch.split(inputs, [sizes.width, sizes.group_width, sizes.group_width], 2)
    x = x.unflatten(2, (sizes.num_heads, -1)).transpose(1, 2)  # [num_seqs, num_heads, CHUNK, head_dim]
    left, right = (
        each.unflatten(2, (sizes.num_groups, -1))
        .repeat_interleave(sizes.num_heads // sizes.num_groups, 2)
        .transpose(1, 2)
        for each in (left, right)
    )  # [num_seqs, num_heads, CHUNK, state_size]
    scaled = x * step.transpose(1, 2).unsqueeze(3)
    total = (step * mixer.decay).transpose(1, 2).cumsum(2)  # [num_seqs, num_heads, CHUNK]
    between = (total.unsqueeze(3) - total.unsqueeze(2)).tril().exp().tril()
    y = (right @ left.transpose(2, 3) * between) @ scaled
    y = y + (right @ state) * total.exp().unsqueeze(3) + x * mixer.skip[:, None, None]
    last = total[:, :, -1:]
    rest = (left * (last - total).exp().unsqueeze(3)).transpose(2, 3)
    return y.transpose(1, 2).flatten(2), state * last.exp().unsqueeze(3) + rest @ scaled
