"""Conversion of codes to floats in memory, for products with many rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgis.shard.kernels.cuda.codes.numbers import (
    CodeArguments,
    CodeForm,
    find_numbers,
    load_codes,
    load_planes,
)
from tgis.shard.kernels.cuda.codes.packed import OUTPUTS, PackedCodes

NUM_WARPS = 4


@triton.jit
def widen_codes_kernel(weight, out, in_features, out_features, FORM: tl.constexpr):
    """Convert tile `program_id(0)` of panel `program_id(1)`."""
    tile = tl.program_id(0)
    panel = tl.program_id(1).to(tl.int64)
    codes, other_codes = load_codes(weight, panel, tile, FORM)
    row = panel * FORM.outputs + tl.arange(0, FORM.outputs)
    for half in tl.static_range(2):
        scale, zero, offset = load_planes(weight, panel, 2 * tile + half, FORM)
        numbers = find_numbers(weight, codes, zero, FORM) * scale + offset
        column = (2 * tile + half) * FORM.piece + tl.arange(0, FORM.piece)
        if weight.order is not None:
            column = tl.load(weight.order + column)
        is_column = (column >= 0) & (column < in_features)
        is_inside = (row < out_features)[:, None] & is_column[None, :]
        place = row[:, None] * in_features + column[None, :]
        tl.store(out + place, numbers.to(out.dtype.element_ty), mask=is_inside)
        codes = other_codes


def launch(weight: PackedCodes, dtype: torch.dtype) -> Tensor:
    """Return the weights as `dtype`, [out_features, in_features]."""
    out = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=weight.codes.device)
    widen_codes_kernel[(weight.num_tiles, weight.num_panels)](
        CodeArguments.of(weight),
        out,
        weight.in_features,
        weight.out_features,
        FORM=CodeForm.of(weight),
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
