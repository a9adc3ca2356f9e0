"""Chunks of tokens in kernels of recurrent layers and in their twins."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgis.shard.kernels.cuda.step_state import STATE_CHUNK
from tgis.shard.memory.state_cache import StateSizes, StepStates

CHUNK = tl.constexpr(STATE_CHUNK)
MIN_PRODUCT = 16  # minimum sizes of tensor-core products
COLUMNS = 16  # channels of a program


class ScanSizes(NamedTuple):
    """Constants of a scan. A program has some channels of one head of a sequence, and each of its warps a
    slice of their sums, because a warp would otherwise hold whole operands of the products with all sums."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    num_channels: int
    pending_width: int
    block: int  # neighbouring channels whose sums are stored together
    slices: int  # of the sums, a power of 2
    depth: int  # sums of each channel in a slice, a power of 2
    columns: int  # channels of a program

    @classmethod
    def of(cls, sizes: StateSizes, max_depth: int) -> "ScanSizes":
        padded = max(MIN_PRODUCT, triton.next_power_of_2(sizes.state_size))
        depth = min(padded, max_depth)
        widths = sizes.num_channels, sizes.pending_width, sizes.block
        return cls(*sizes[:4], *widths, padded // depth, depth, COLUMNS)

    @property
    def num_parts(self) -> int:
        """Number of programs per head."""
        return -(-self.head_dim // self.columns)


class StateMemory(NamedTuple):
    """One layer's part of all states, float32. Parts of a slot are contiguous."""

    windows: Tensor  # [num_slots, kernel_size - 1, num_channels]
    sums: Tensor  # [num_slots, num_heads, head_dim / block, state_size, block]
    pending: Tensor  # [num_slots, CHUNK, pending_width]

    @classmethod
    def of(cls, states: StepStates, layer: int) -> "StateMemory":
        cache = states.cache
        assert cache.shape.chunk == STATE_CHUNK, "the kernels' sums advance by chunks"
        return cls(cache.windows(layer), cache.sums(layer), cache.pending(layer))


class Spans(NamedTuple):
    """New tokens of a step's sequences, integers [num_seqs] or, for `begins`, [num_seqs + 1]."""

    slots: Tensor
    begins: Tensor
    starts: Tensor

    @classmethod
    def of(cls, states: StepStates) -> "Spans":
        assert states.starts is not None, "chunks begin at positions of the sequence"
        return cls(states.slots, states.begins, states.starts)


# Spans may begin anywhere in some other tensor, which makes no variants of a kernel.
SPAN_NAMES = ("slots", "begins", "starts")


@triton.jit
def load_span(slots, begins, starts):
    """Return the first new token of sequence `program_id(0)`, their number, their first position, and the
    state's slot."""
    seq = tl.program_id(0)
    begin = tl.load(begins + seq).to(tl.int64)
    count = tl.load(begins + seq + 1).to(tl.int64) - begin
    return begin, count, tl.load(starts + seq).to(tl.int64), tl.load(slots + seq).to(tl.int64)


@triton.jit
def find_tokens(first, begin, start, end):
    """Return the row in the step of each token of the chunk from position `first` on, whether it is new, and
    whether it is pending."""
    position = first + tl.arange(0, CHUNK)
    return begin - start + position, (position >= start) & (position < end), position < start


@triton.jit
def load_inputs(channels, at, is_new, old, is_old, column, is_column, SIZES: tl.constexpr):
    """Return columns of a chunk's channels, float32 [CHUNK, num_columns]: new ones from rows `at` of
    `channels`, pending ones from `old`, and zeros."""
    place = tl.arange(0, CHUNK)
    fresh = tl.load(
        channels + at[:, None] * SIZES.num_channels + column[None, :],
        mask=is_new[:, None] & is_column[None, :],
        other=0.0,
    )
    kept = tl.load(
        old + place[:, None] * SIZES.pending_width + column[None, :],
        mask=is_old[:, None] & is_column[None, :],
        other=0.0,
    )
    return fresh + kept


@triton.jit
def load_slices(channels, at, is_new, old, is_old, first, SIZES: tl.constexpr):
    """Return state_size columns of a chunk's channels, from column `first` on, cut like the sums: float32
    [slices, CHUNK, depth]."""
    n = find_places(SIZES)[:, None, :]
    is_n = n < SIZES.state_size
    place = tl.arange(0, CHUNK)[None, :, None]
    fresh = tl.load(
        channels + at[None, :, None] * SIZES.num_channels + (first + n),
        mask=is_new[None, :, None] & is_n,
        other=0.0,
    )
    kept = tl.load(
        old + place * SIZES.pending_width + (first + n), mask=is_old[None, :, None] & is_n, other=0.0
    )
    return fresh + kept


@triton.jit
def find_places(SIZES: tl.constexpr):
    """Return the places of sums in a channel, [slices, depth]."""
    return tl.arange(0, SIZES.slices)[:, None] * SIZES.depth + tl.arange(0, SIZES.depth)[None, :]


@triton.jit
def find_sums(head, p, SIZES: tl.constexpr):
    """Return the offsets of the sums of channels p, [columns], of a head in its state, and which of them
    exist: [slices, depth, columns] both."""
    n = find_places(SIZES)[:, :, None]
    place = (p // SIZES.block * SIZES.state_size)[None, None, :] + n
    place = head * (SIZES.head_dim * SIZES.state_size) + place * SIZES.block
    is_sum = (n < SIZES.state_size) & (p < SIZES.head_dim)[None, None, :]
    return place + (p % SIZES.block)[None, None, :], is_sum


@triton.jit
def multiply_state(x, state):
    """Return the product of rows, [slices, CHUNK, depth], with all sums: [CHUNK, columns]."""
    return tl.sum(multiply(x, state), 0)


@triton.jit
def multiply_rows(x, y):
    """Return the products of all pairs of rows, [slices, CHUNK, depth] both: [CHUNK, CHUNK]."""
    return tl.sum(multiply(x, tl.permute(y, (0, 2, 1))), 0)


@triton.jit
def advance(state, total, x, update, SIZES: tl.constexpr):
    """Return the sums after a chunk: state * decay + x^T update, where each token's part has decayed since.
    x: [slices, CHUNK, depth], update: [CHUNK, columns], total: see `find_decays`."""
    last = tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, total, 0.0), 0)
    rest = tl.permute(x * tl.exp(last - total)[None, :, None], (0, 2, 1))
    added = tl.broadcast_to(update[None, :, :], (SIZES.slices, CHUNK, SIZES.columns))
    return state * tl.exp(last) + multiply(rest, added)


@triton.jit
def load_numbers(new, at, is_new, width, column, old, is_old, old_width, old_column):
    """Return one column of a chunk's inputs, float32 [CHUNK]."""
    fresh = tl.load(new + at * width + column, mask=is_new, other=0.0).to(tl.float32)
    kept = tl.load(old + tl.arange(0, CHUNK) * old_width + old_column, mask=is_old, other=0.0)
    return fresh + kept


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)) with a small relative error also for large negative x."""
    power = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + power
    rest = total - 1.0
    near = tl.where(rest == 0.0, power, tl.log(total) * (power / tl.where(rest == 0.0, 1.0, rest)))
    return tl.where(x > 20.0, x, near)


@triton.jit
def find_decays(total):
    """Return the decay between all pairs of a chunk's tokens, [CHUNK, CHUNK], 0 from later to earlier ones.
    total: [CHUNK], sums of the logarithms of decays."""
    i = tl.arange(0, CHUNK)
    is_causal = i[:, None] >= i[None, :]
    return tl.where(is_causal, tl.exp(tl.where(is_causal, total[:, None] - total[None, :], 0.0)), 0.0)


@triton.jit
def multiply(a, b):
    """Return the product of float32 matrices in float32. Three products of tensor cores keep its digits."""
    return tl.dot(a, b, input_precision="tf32x3")


class ChunkTokens(NamedTuple):
    """Tokens of the same chunk of all sequences, counted from the chunk of their first new token."""

    at: Tensor  # int64 [num_seqs, CHUNK], index of the new token in the step
    is_new: Tensor  # bool
    is_old: Tensor  # bool
    is_whole: Tensor  # bool [num_seqs], True if the chunk has a new token and is complete

    def read(self, new: Tensor, old: Tensor) -> Tensor:
        """Return float32 inputs [num_seqs, CHUNK, width] from new, [num_tokens, width], and old, [num_seqs,
        CHUNK, width]."""
        kept = torch.where(self.is_old.unsqueeze(2), old, 0.0)
        return torch.where(self.is_new.unsqueeze(2), new[self.at].float(), kept)

    def write(self, y: Tensor, results: Tensor) -> None:
        """Write results [num_seqs, CHUNK, width] of new tokens to y, [num_tokens + 1, width], whose last row
        receives those of others."""
        y[torch.where(self.is_new, self.at, len(y) - 1)] = results


def list_chunks(spans: Spans, num_tokens: int) -> list[ChunkTokens]:
    """Return as many chunks as one sequence with all tokens can have. This waits for no value."""
    slots, begins, starts = (each.long() for each in spans)
    ends = starts + begins.diff()
    place = torch.arange(STATE_CHUNK, device=slots.device)
    chunks = []
    for number in range(num_tokens // STATE_CHUNK + 2):
        first = (torch.div(starts, STATE_CHUNK, rounding_mode="floor") + number) * STATE_CHUNK
        positions = first.unsqueeze(1) + place  # [num_seqs, CHUNK]
        is_old = positions < starts.unsqueeze(1)
        is_new = ~is_old & (positions < ends.unsqueeze(1))
        at = (begins[:-1] - starts).unsqueeze(1) + positions
        is_whole = (first + STATE_CHUNK <= ends) & is_new.any(1)
        chunks.append(ChunkTokens(at.clamp(0, num_tokens - 1), is_new, is_old, is_whole))
    return chunks


def read_sums(sums: Tensor) -> Tensor:
    """Return sums of slots, [n, num_heads, num_blocks, state_size, block], as [n, num_heads, state_size,
    head_dim]."""
    return sums.transpose(2, 3).flatten(3)


def write_sums(state: Tensor, sums: Tensor, slots: Tensor) -> None:
    """Write the states of slots, [n, num_heads, state_size, head_dim]."""
    num_blocks, _, block = sums.shape[2:]
    sums[slots] = state.unflatten(3, (num_blocks, block)).transpose(2, 3)
