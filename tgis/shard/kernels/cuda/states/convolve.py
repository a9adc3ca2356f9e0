"""Causal convolution of the inputs of recurrent layers."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tgis.shard.kernels.cuda.states.chunks import SPAN_NAMES, Spans, load_span

TOKENS, CHANNELS, NUM_WARPS = 8, 256, 4
MAX_PARTS = 8  # programs that share the tokens of a sequence


@triton.jit(do_not_specialize_on_alignment=SPAN_NAMES)
def convolve_kernel(
    rows,
    kernel,
    bias,
    windows,
    slots,
    begins,
    starts,
    slot_stride,
    out,
    ROW_SIZE: tl.constexpr,
    COLUMN: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    KERNEL_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute CHANNELS channels of every num_programs(2)-th group of TOKENS tokens of a sequence."""
    begin, count, _, slot = load_span(slots, begins, starts)
    windows += slot * slot_stride
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < NUM_CHANNELS
    first_bias = tl.load(bias + channel, mask=is_channel, other=0.0)
    BEFORE: tl.constexpr = KERNEL_SIZE - 1
    for first in range(tl.program_id(2) * TOKENS, count, tl.num_programs(2) * TOKENS):
        token = first + tl.arange(0, TOKENS)
        total = tl.zeros((TOKENS, CHANNELS), tl.float32) + first_bias[None, :]
        for j in tl.static_range(KERNEL_SIZE):
            weight = tl.load(kernel + j * NUM_CHANNELS + channel, mask=is_channel, other=0.0)
            source = token - BEFORE + j
            is_new = (source >= 0) & (token < count)
            is_old = (source < 0) & (token < count)
            fresh = tl.load(
                rows + (begin + source)[:, None] * ROW_SIZE + (COLUMN + channel)[None, :],
                mask=is_new[:, None] & is_channel[None, :],
                other=0.0,
            ).to(tl.float32)
            kept = tl.load(
                windows + (BEFORE + source)[:, None] * NUM_CHANNELS + channel[None, :],
                mask=is_old[:, None] & is_channel[None, :],
                other=0.0,
            )
            total += (fresh + kept) * weight[None, :]
        place = (begin + token)[:, None] * NUM_CHANNELS + channel[None, :]
        is_stored = (token < count)[:, None] & is_channel[None, :]
        tl.store(out + place, total * tl.sigmoid(total), mask=is_stored)


def launch(rows: Tensor, column: int, kernel: Tensor, bias: Tensor, windows: Tensor, spans: Spans) -> Tensor:
    """Return silu of the convolution of new inputs, float32 [num_tokens, num_channels].

    rows: contiguous [num_tokens, any], with the channels from `column` on. kernel: float32 [kernel_size,
    num_channels], bias: float32 [num_channels]. windows: see `StateMemory`; they are not changed. Rows of
    tokens outside of all spans are undefined."""
    assert rows.is_contiguous(), "rows are contiguous"
    num_tokens = len(rows)
    num_seqs = len(spans.slots)
    num_channels = kernel.shape[1]
    out = torch.empty(num_tokens, num_channels, dtype=torch.float32, device=rows.device)
    parts = 1 if num_tokens <= num_seqs else min(MAX_PARTS, triton.cdiv(num_tokens, TOKENS))
    convolve_kernel[num_seqs, triton.cdiv(num_channels, CHANNELS), parts](
        rows,
        kernel,
        bias,
        windows,
        *spans,
        windows.stride(0),
        out,
        ROW_SIZE=rows.shape[1],
        COLUMN=column,
        NUM_CHANNELS=num_channels,
        KERNEL_SIZE=len(kernel),
        TOKENS=TOKENS,
        CHANNELS=CHANNELS,
        num_warps=NUM_WARPS,
    )
    return out


def plain(rows: Tensor, column: int, kernel: Tensor, bias: Tensor, windows: Tensor, spans: Spans) -> Tensor:
    kernel_size, num_channels = kernel.shape
    slots, begins, _ = (each.long() for each in spans)
    inputs = rows[:, column : column + num_channels].float()
    token = torch.arange(len(rows), device=rows.device)
    seq = torch.searchsorted(begins[1:], token, right=True).clamp(max=len(slots) - 1)
    offset = (token - begins[seq]).unsqueeze(1)  # [num_tokens, 1]
    total = bias.expand(len(rows), -1)
    for j in range(kernel_size):
        before = kernel_size - 1 - j
        old = windows[slots[seq], (token - begins[seq] + j).clamp(max=kernel_size - 2)]
        total = total + torch.where(offset < before, old, inputs.roll(before, 0)) * kernel[j]
    return F.silu(total)
