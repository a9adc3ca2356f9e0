"""Gated DeltaNet's sums, as products of matrices for chunks of tokens (Yang, Kautz and Hatamizadeh, 2024).

In a chunk, the updates u of the tokens solve (1 + A) u = w, where A is strictly lower triangular."""

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
from tgis.shard.kernels.portable.delta_net import EPS
from tgis.shard.layers.states import DeltaNet

_EPS = tl.constexpr(EPS)


@triton.jit
def _scale_to_length(x):
    """Scale rows, [slices, CHUNK, depth], to the length 1. Rows of zeros stay zeros."""
    squares = tl.sum(tl.sum(x * x, 2), 0)  # [CHUNK]
    return x * (1.0 / tl.sqrt(squares + _EPS))[None, :, None]


@triton.jit
def invert(matrix):
    """Return the inverse of 1 + the part of a matrix below its diagonal, [CHUNK, CHUNK], row by row."""
    i = tl.arange(0, CHUNK)
    lower = tl.where(i[:, None] > i[None, :], matrix, 0.0)
    is_diagonal = i[:, None] == i[None, :]
    inverse = tl.where(is_diagonal, 1.0, 0.0)
    for row in tl.static_range(1, CHUNK):
        factors = tl.sum(tl.where(i[:, None] == row, lower, 0.0), 0)  # [CHUNK], row `row`
        solved = -tl.sum(factors[:, None] * inverse, 0)
        inverse = tl.where((i[:, None] == row) & ~is_diagonal, solved[None, :], inverse)
    return inverse


MAX_DEPTH = 16  # sums of each channel per warp; more do not fit into its registers
NUM_STAGES = 1  # loads of the next chunk before its turn would not fit either


@triton.jit
def _load_gates(
    gates,
    at,
    is_new,
    old,
    is_old,
    head,
    GATES_SIZE: tl.constexpr,
    FIRST_HEAD: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Return the times and strengths of a chunk, [CHUNK], strengths between 0 and 1."""
    column = FIRST_HEAD + head
    old_column = SIZES.num_channels + head
    width: tl.constexpr = SIZES.pending_width
    time = load_numbers(
        gates, at, is_new, GATES_SIZE, GATES_SIZE // 2 + column, old, is_old, width, old_column
    )
    old_column += SIZES.num_heads
    strength = load_numbers(gates, at, is_new, GATES_SIZE, column, old, is_old, width, old_column)
    return time, tl.sigmoid(strength)


@triton.jit(do_not_specialize_on_alignment=SPAN_NAMES)
def scan_delta_kernel(
    gates,
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
    y,
    GATES_SIZE: tl.constexpr,
    FIRST_HEAD: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Compute the new tokens of a sequence for SIZES.columns channels of one head, chunk by chunk."""
    begin, count, start, slot = load_span(slots, begins, starts)
    if count <= 0:
        return
    head = tl.program_id(1)
    width: tl.constexpr = SIZES.num_heads * SIZES.head_dim
    key_width: tl.constexpr = SIZES.num_groups * SIZES.state_size
    p = tl.program_id(2) * SIZES.columns + tl.arange(0, SIZES.columns)
    query_at = head * SIZES.num_groups // SIZES.num_heads * SIZES.state_size
    key_at, value_at = query_at + key_width, 2 * key_width + head * SIZES.head_dim + p
    place, is_sum = find_sums(head, p, SIZES)
    state = tl.load(sums + slot * sums_stride + place, mask=is_sum, other=0.0)  # [slices, depth, columns]
    rate, bias = tl.load(decay + head), tl.load(time_bias + head)
    old, end = pending + slot * pending_stride, start + count
    for first in range(start // CHUNK * CHUNK, end, CHUNK):
        at, is_new, is_old = find_tokens(first, begin, start, end)
        time, strength = _load_gates(gates, at, is_new, old, is_old, head, GATES_SIZE, FIRST_HEAD, SIZES)
        total = tl.cumsum(tl.where(is_new | is_old, softplus(time + bias) * rate, 0.0), 0)
        query = load_slices(channels, at, is_new, old, is_old, query_at, SIZES)
        query = _scale_to_length(query) * (SIZES.state_size**-0.5)
        key = _scale_to_length(load_slices(channels, at, is_new, old, is_old, key_at, SIZES))
        value = load_inputs(channels, at, is_new, old, is_old, value_at, p < SIZES.head_dim, SIZES)
        since, decays = tl.exp(total)[:, None], find_decays(total)
        wanted = (value - multiply_state(key, state) * since) * strength[:, None]
        lower = multiply_rows(key, key) * decays * strength[:, None]
        update = multiply(invert(lower), wanted)  # [CHUNK, columns]
        result = multiply_state(query, state) * since + multiply(multiply_rows(query, key) * decays, update)
        target = y + at[:, None] * width + (head * SIZES.head_dim + p)[None, :]
        tl.store(target, result, mask=is_new[:, None] & (p < SIZES.head_dim)[None, :])
        if first + CHUNK <= end:
            state = advance(state, total, key, update, SIZES)
    if end // CHUNK > start // CHUNK:
        tl.store(sums + slot * sums_stride + place, state, mask=is_sum)


def launch(gates: Tensor, channels: Tensor, mixer: DeltaNet, memory: StateMemory, spans: Spans) -> Tensor:
    """Return the heads' outputs of new tokens, float32 [num_tokens, width], before norm and gate, and advance
    the sums by whole chunks.

    gates: contiguous [num_tokens, 2 * total_heads]. channels: contiguous float32 [num_tokens, num_channels],
    after the convolution. Rows of tokens outside of all spans are undefined."""
    sizes = ScanSizes.of(mixer.sizes, MAX_DEPTH)
    y = torch.empty(len(gates), mixer.sizes.width, dtype=torch.float32, device=gates.device)
    scan_delta_kernel[len(spans.slots), sizes.num_heads, sizes.num_parts](
        gates,
        channels,
        memory.sums,
        memory.pending,
        *spans,
        memory.sums.stride(0),
        memory.pending.stride(0),
        mixer.decay,
        mixer.time_bias,
        y,
        GATES_SIZE=gates.shape[1],
        FIRST_HEAD=mixer.first_head,
        SIZES=sizes,
        num_warps=sizes.slices,
        num_stages=NUM_STAGES,
    )
    return y


def plain(gates: Tensor, channels: Tensor, mixer: DeltaNet, memory: StateMemory, spans: Spans) -> Tensor:
    sizes = mixer.sizes
    slots = spans.slots.long()
    pending = memory.pending[slots]
    old_channels, old_times, old_strengths = torch.split(
        pending, [sizes.num_channels, sizes.num_heads, sizes.num_heads], 2
    )
    own = slice(mixer.first_head, mixer.first_head + sizes.num_heads)
    strengths, times = (each[:, own] for each in torch.split(gates, mixer.total_heads, 1))
    state = read_sums(memory.sums[slots])  # [num_seqs, num_heads, state_size, head_dim]
    y = channels.new_zeros(len(gates) + 1, sizes.width)
    for chunk in list_chunks(spans, len(gates)):
        logs = F.softplus(chunk.read(times, old_times) + mixer.time_bias) * mixer.decay
        logs = logs * (chunk.is_new | chunk.is_old).unsqueeze(2)
        strength = torch.sigmoid(chunk.read(strengths, old_strengths))
        result, after = _advance(chunk.read(channels, old_channels), logs, strength, mixer, state)
        chunk.write(y, result)
        state = torch.where(chunk.is_whole.view(-1, 1, 1, 1), after, state)
    write_sums(state, memory.sums, slots)
    return y[:-1]


def _advance(
    inputs: Tensor, logs: Tensor, strength: Tensor, mixer: DeltaNet, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs of a chunk, [num_seqs, CHUNK, width], and the state after it. inputs: [num_seqs,
    CHUNK, num_channels]; logs of decays, and strengths: [num_seqs, CHUNK, num_heads]."""
    sizes = mixer.sizes
    queries, keys, values = torch.split(inputs, [sizes.group_width, sizes.group_width, sizes.width], 2)
    queries, keys = (
        (heads * (heads.square().sum(-1, keepdim=True) + EPS).rsqrt())
        .repeat_interleave(sizes.num_heads // sizes.num_groups, 2)
        .transpose(1, 2)
        for heads in (each.unflatten(2, (sizes.num_groups, -1)) for each in (queries, keys))
    )  # [num_seqs, num_heads, CHUNK, state_size]
    queries = queries * sizes.state_size**-0.5
    values = values.unflatten(2, (sizes.num_heads, -1)).transpose(1, 2)
    strength = strength.transpose(1, 2).unsqueeze(3)
    total = logs.transpose(1, 2).cumsum(2)  # [num_seqs, num_heads, CHUNK]
    between = (total.unsqueeze(3) - total.unsqueeze(2)).tril().exp().tril()
    since = total.exp().unsqueeze(3)
    lower = (keys @ keys.transpose(2, 3) * between * strength).tril(-1)
    wanted = (values - (keys @ state) * since) * strength
    unit = torch.eye(lower.shape[-1], device=lower.device)
    updates = torch.linalg.solve_triangular(lower + unit, wanted, upper=False, unitriangular=True)
    y = (queries @ state) * since + (queries @ keys.transpose(2, 3) * between) @ updates
    last = total[:, :, -1:]
    rest = (keys * (last - total).exp().unsqueeze(3)).transpose(2, 3)
    return y.transpose(1, 2).flatten(2), state * last.exp().unsqueeze(3) + rest @ updates
