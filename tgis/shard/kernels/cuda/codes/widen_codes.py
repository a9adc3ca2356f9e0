"""Conversion of codes to floats in memory, for products with many rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgis.shard.kernels.cuda.codes.numbers import find_numbers
from tgis.shard.kernels.cuda.codes.packed import OUTPUTS, PackedCodes

NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_groups", "pieces_per_group"])
def widen_codes_kernel(
    codes,
    scales,
    zeros,
    offsets,
    table,
    order,
    out,
    in_features,
    out_features,
    num_groups,
    pieces_per_group,
    OUTPUTS: tl.constexpr,
    PIECE: tl.constexpr,
    BITS: tl.constexpr,
    CENTRE: tl.constexpr,
    NUMBERS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
):
    """Convert half `program_id(2)` of tile `program_id(0)` of panel `program_id(1)`."""
    tile, panel, half = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    output = tl.arange(0, OUTPUTS)
    place = output[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    HALF_BYTES: tl.constexpr = OUTPUTS * PIECE
    codes += (panel * tl.num_programs(0) + tile) * (HALF_BYTES * BITS // 4)
    if BITS == 4:
        packed = tl.load(codes + place).to(tl.int32) >> (4 * half) & 15
    else:
        packed = tl.load(codes + half * HALF_BYTES + place).to(tl.int32)
    piece = 2 * tile + half
    plane = (panel * num_groups + piece // pieces_per_group) * OUTPUTS + output
    zero = 0.0
    if HAS_ZEROS:
        zero = tl.load(zeros + plane).to(tl.float32)
    weight = find_numbers(packed, zero, table, CENTRE, NUMBERS, HAS_ZEROS)
    weight *= tl.load(scales + plane).to(tl.float32)[:, None]
    if HAS_OFFSETS:
        weight += tl.load(offsets + plane).to(tl.float32)[:, None]
    column = piece * PIECE + tl.arange(0, PIECE)
    if HAS_ORDER:
        column = tl.load(order + column)
    row = panel * OUTPUTS + output
    is_inside = (row < out_features)[:, None] & ((column >= 0) & (column < in_features))[None, :]
    tl.store(
        out + row[:, None] * in_features + column[None, :], weight.to(out.dtype.element_ty), mask=is_inside
    )


def launch(weight: PackedCodes, dtype: torch.dtype) -> Tensor:
    """Return the weights as `dtype`, [out_features, in_features]."""
    out = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=weight.codes.device)
    widen_codes_kernel[(weight.num_tiles, weight.num_panels, 2)](
        *(weight.codes, weight.scales, weight.zeros, weight.offsets, weight.table, weight.order, out),
        *(weight.in_features, weight.out_features, weight.num_groups, weight.pieces_per_group),
        OUTPUTS=OUTPUTS,
        PIECE=weight.piece,
        BITS=weight.bits,
        CENTRE=weight.centre,
        NUMBERS=weight.numbers,
        HAS_ZEROS=weight.zeros is not None,
        HAS_OFFSETS=weight.offsets is not None,
        HAS_ORDER=weight.order is not None,
        num_warps=NUM_WARPS,
    )
    return out


def plain(weight: PackedCodes, dtype: torch.dtype) -> Tensor:
    codes = weight.list_halves()
    if weight.table is not None:
        numbers = weight.table.index_select(0, codes.flatten().int()).view(codes.shape)
    elif weight.numbers == "float8":
        numbers = codes.view(torch.float8_e4m3fn).float()
    else:
        numbers = codes.float()
    pieces = numbers.view(weight.num_panels, OUTPUTS, -1, weight.piece)
    groups = torch.arange(pieces.shape[2], device=codes.device) // weight.pieces_per_group

    def spread(plane: Tensor) -> Tensor:
        """Return [num_panels, OUTPUTS, num_pieces, 1]."""
        return plane.float().index_select(1, groups).transpose(1, 2).unsqueeze(-1)

    if weight.zeros is not None:
        pieces = pieces - spread(weight.zeros)
    elif weight.centre:
        pieces = pieces - weight.centre
    pieces = pieces * spread(weight.scales)
    if weight.offsets is not None:
        pieces = pieces + spread(weight.offsets)
    whole = pieces.view(codes.shape)[: weight.out_features]
    if weight.order is None:
        return whole[:, : weight.in_features].to(dtype).contiguous()
    # One more column for the padding.
    out = whole.new_zeros(len(whole), weight.in_features + 1)
    places = torch.where(weight.order < 0, weight.in_features, weight.order).long()
    return out.index_copy_(1, places, whole)[:, : weight.in_features].to(dtype).contiguous()
