"""Adds the updates of LoRA adapters to a layer's output, for tokens of any adapters and ranks: y += x a b.

A first kernel computes x a, in parts of the sum over the input's columns. A second one adds the parts in
their order, and multiplies by b. A token's bits depend on its adapter and input only: neither on other tokens
nor on its place in a tile."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgis.shard.kernels.cuda.grouped.group_rows import RowTiles, read_tile
from tgis.shard.kernels.cuda.grouped.slots import ENTRY, TILE, SlotDeltas

BLOCK_RANK, BLOCK_IN, BLOCK_OUT = 16, 64, 128
MAX_PARTS, MIN_PART = 8, 512  # parts of a sum, and their minimum number of columns
NUM_WARPS, NUM_STAGES = 4, 3

_ENTRY, _TILE = tl.constexpr(ENTRY), tl.constexpr(TILE)
_BLOCK_RANK, _BLOCK_IN, _BLOCK_OUT = (tl.constexpr(n) for n in (BLOCK_RANK, BLOCK_IN, BLOCK_OUT))


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "slot_stride"])
def shrink(
    x,
    entries,
    order,
    tiles,
    products,
    num_rows,
    num_blocks,
    slot_stride,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
    NUM_TERMS: tl.constexpr,
):
    """Multiply a tile of rows of x by PART rows of one term's a, whose columns are contiguous. Up to the next
    multiple of BLOCK_RANK, columns beyond the rank become 0."""
    max_rank = num_blocks * _BLOCK_RANK  # tells the compiler that it is a multiple
    tile, term, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(tiles + 3 * tile + 2) == 0:
        return
    slot, place, is_row, row = read_tile(order, tiles, tile, _TILE)
    entry = entries + slot * slot_stride + term * _ENTRY
    rank = tl.load(entry + 2).to(tl.int32)
    if rank == 0:
        return
    a = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.float32)), 16)
    at = ((part.to(tl.int64) * num_rows + place) * NUM_TERMS + term) * max_rank
    for first in range(0, rank, _BLOCK_RANK):
        channel = first + tl.arange(0, _BLOCK_RANK)
        total = tl.zeros((_TILE, _BLOCK_RANK), tl.float32)
        for begin in range(0, PART, _BLOCK_IN):
            column = part * PART + begin + tl.arange(0, _BLOCK_IN)
            is_column = (column < SIZE)[None, :]
            value = tl.load(
                x + row[:, None] * SIZE + column[None, :], mask=is_row[:, None] & is_column, other=0.0
            )
            weight = tl.load(
                a + channel[:, None].to(tl.int64) * SIZE + column[None, :],
                mask=(channel < rank)[:, None] & is_column,
                other=0.0,
            )
            total = tl.dot(value.to(tl.float32), tl.trans(weight), total, input_precision="tf32x3")
        tl.store(products + at[:, None] + channel[None, :], total, mask=is_row[:, None])


@triton.jit
def _add_parts(at, mask, stride, NUM_PARTS: tl.constexpr):
    """Return the sum of NUM_PARTS arrays in their order, each `stride` numbers after the one before."""
    total = tl.load(at, mask=mask, other=0.0)
    for part in tl.static_range(1, NUM_PARTS):
        total += tl.load(at + part * stride, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "slot_stride"])
def expand(
    y,
    products,
    ids,
    entries,
    order,
    tiles,
    num_rows,
    num_blocks,
    slot_stride,
    SIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_TERMS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    IS_TABLE: tl.constexpr,
):
    """Add the product of x a, or of rows `ids` of a, with b to a tile of rows and columns of y."""
    max_rank = num_blocks * _BLOCK_RANK  # tells the compiler that it is a multiple
    tile = tl.program_id(0)
    if tl.load(tiles + 3 * tile + 2) == 0:
        return
    slot, place, is_row, row = read_tile(order, tiles, tile, _TILE)
    start = tl.program_id(1) * _BLOCK_OUT
    column = start + tl.arange(0, _BLOCK_OUT)
    for term in tl.static_range(NUM_TERMS):
        entry = entries + slot * slot_stride + term * _ENTRY
        rank = tl.load(entry + 2).to(tl.int32)
        begin = tl.multiple_of(tl.load(entry + 3).to(tl.int32), ALIGNMENT)
        width = tl.multiple_of(tl.load(entry + 4).to(tl.int32), ALIGNMENT)
        if (rank > 0) & (begin < start + _BLOCK_OUT) & (begin + width > start):
            b = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.float32)), 16)
            is_column = (column >= begin) & (column < begin + width)
            total = tl.zeros((_TILE, _BLOCK_OUT), tl.float32)
            for first in range(0, rank, _BLOCK_RANK):
                channel = first + tl.arange(0, _BLOCK_RANK)
                if IS_TABLE:
                    a = tl.load(entry).to(tl.pointer_type(tl.float32))
                    at = a + tl.load(ids + row, mask=is_row, other=0)[:, None] * rank + channel[None, :]
                    factor = tl.load(at, mask=is_row[:, None] & (channel < rank)[None, :], other=0.0)
                else:
                    at = products + (place.to(tl.int64) * NUM_TERMS + term) * max_rank
                    stride = num_rows.to(tl.int64) * NUM_TERMS * max_rank
                    factor = _add_parts(at[:, None] + channel[None, :], is_row[:, None], stride, NUM_PARTS)
                weight = tl.load(
                    b + channel[:, None].to(tl.int64) * width + (column - begin)[None, :],
                    mask=(channel < rank)[:, None] & is_column[None, :],
                    other=0.0,
                )
                total = tl.dot(factor, weight, total, input_precision="tf32x3")
            _add_to(y + row[:, None] * SIZE + column[None, :], total, is_row[:, None] & is_column[None, :])


@triton.jit
def _add_to(at, value, mask):
    old = tl.load(at, mask=mask, other=0.0)
    tl.store(at, (old.to(tl.float32) + value).to(old.dtype), mask=mask)


def launch(y: Tensor, x: Tensor, deltas: SlotDeltas, rows: RowTiles, slots: Tensor, max_rank: int) -> None:
    """Add the updates of the tokens' slots, int32 [num_tokens], to y, [num_tokens, out_features], in place.
    x: [num_tokens, in_features] or, for an embedding, int64 token ids [num_tokens]. Both are contiguous."""
    num_rows, out_size = y.shape
    if not num_rows:
        return
    assert y.is_contiguous(), "rows are contiguous"
    assert x.is_contiguous(), "rows are contiguous"
    num_terms = deltas.entries.shape[1]
    is_table = x.dim() == 1
    size = 1 if is_table else x.shape[1]
    num_parts = min(MAX_PARTS, triton.cdiv(size, MIN_PART))
    num_blocks = triton.cdiv(max_rank, BLOCK_RANK)
    sizes = num_rows, num_blocks, deltas.entries.stride(0)
    products = None
    if not is_table:
        products = torch.empty((num_parts, num_rows, num_terms, num_blocks * BLOCK_RANK), device=x.device)
        part = triton.cdiv(triton.cdiv(size, num_parts), BLOCK_IN) * BLOCK_IN
        shrink[(len(rows.tiles), num_terms, num_parts)](
            x,
            deltas.entries,
            *rows,
            products,
            *sizes,
            SIZE=size,
            PART=part,
            NUM_TERMS=num_terms,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )
    expand[(len(rows.tiles), triton.cdiv(out_size, BLOCK_OUT))](
        y,
        products,
        x if is_table else None,
        deltas.entries,
        *rows,
        *sizes,
        SIZE=out_size,
        NUM_PARTS=num_parts,
        NUM_TERMS=num_terms,
        ALIGNMENT=deltas.alignment,
        IS_TABLE=is_table,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )


def plain(y: Tensor, x: Tensor, deltas: SlotDeltas, rows: RowTiles, slots: Tensor, max_rank: int) -> None:
    """Read the adapters of the host's slots instead of the table, so captures of this function are wrong."""
    for slot, adapter in enumerate(deltas.slots.held):
        for one in () if adapter is None else adapter.deltas.get(deltas.path, ()):
            update = (one.a[x] if x.dim() == 1 else x.float() @ one.a) @ one.b  # [num_tokens, width]
            columns = y[:, one.first : one.first + one.b.shape[1]]
            is_own = (slots == slot).unsqueeze(1)
            columns.copy_(torch.where(is_own, columns + update, columns))
