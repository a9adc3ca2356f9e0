"""Products with codes. Tensor cores multiply the numbers of codes, which are exact in 16 bits except for
those of some tables, and each group's sum is multiplied by its scale in float32.

The sums of a row have the same order however many rows there are: tiles in order within a part of the
columns, and then the parts in order. The number of parts depends on the matrix only."""

import torch
import torch.nn.functional as F
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
from tgis.shard.kernels.cuda.codes.packed import PackedCodes
from tgis.shard.kernels.cuda.codes.widen_codes import plain as widen
from tgis.shard.kernels.cuda.few_rows import add_parts
from tgis.shard.kernels.cuda.few_rows.store_tile import store_tile

MAX_ROWS = 256
"""Maximum rows for which codes are converted anew for each group of rows. For more rows, it takes less time
to write the weights to memory as floats, once, and multiply those."""
NUM_WARPS = 4
STAGES = {16: 4, 32: 4, 64: 3}  # rows of x that a program multiplies -> tiles in shared memory
WANTED_PROGRAMS, MAX_PARTS, MIN_TILES = 256, 8, 4


@triton.jit
def multiply_half(x, weight, row, is_row, in_features, first, codes, zero, sums, FORM: tl.constexpr):
    """Add the products of the numbers of codes and the columns of x that begin with `first` to `sums`,
    [outputs, ROWS]. Also return the sums of these columns, [1, ROWS], if there are offsets."""
    column = first + tl.arange(0, FORM.piece)
    is_column = column < in_features
    if weight.order is not None:
        column = tl.load(weight.order + column)
        is_column = column >= 0
    place = row[None, :] * in_features + column[:, None]
    x_half = tl.load(x + place, mask=is_column[:, None] & is_row[None, :], other=0.0)  # [piece, ROWS]
    number = find_numbers(weight, codes, zero, FORM)
    sums = tl.dot(number.to(x_half.dtype), x_half, sums, input_precision="ieee")
    x_sum = 0.0
    if weight.offsets is not None:
        x_sum = tl.sum(x_half.to(tl.float32), 0)[None, :]
    return sums, x_sum


@triton.jit
def sum_tiles(x, weight, row, is_row, in_features, panel, begin, end, FORM: tl.constexpr, ROWS: tl.constexpr):
    """Return the products over tiles from `begin` to `end`, [outputs, ROWS]. The scales, zeros and offsets
    of the next pieces are loaded before the current ones are multiplied."""
    OUTPUTS: tl.constexpr = FORM.outputs
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    last = 2 * weight.num_tiles - 1
    scale, zero, offset = load_planes(weight, panel, 2 * begin, FORM)
    for tile in range(begin, end):
        codes, other_codes = load_codes(weight, panel, tile, FORM)
        following = tl.minimum(2 * tile + 1 + FORM.shares_scales, last)
        next_scale, next_zero, next_offset = load_planes(weight, panel, following, FORM)
        sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
        column = 2 * tile * FORM.piece
        sums, x_sum = multiply_half(x, weight, row, is_row, in_features, column, codes, zero, sums, FORM)
        if weight.offsets is not None:
            total += offset * x_sum
        if not FORM.shares_scales:
            total += sums * scale
            scale, zero, offset = next_scale, next_zero, next_offset
            following = tl.minimum(2 * tile + 2, last)
            next_scale, next_zero, next_offset = load_planes(weight, panel, following, FORM)
            sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
        column += FORM.piece
        sums, x_sum = multiply_half(
            x, weight, row, is_row, in_features, column, other_codes, zero, sums, FORM
        )
        if weight.offsets is not None:
            total += offset * x_sum
        total += sums * scale
        scale, zero, offset = next_scale, next_zero, next_offset
    return total


@triton.jit(do_not_specialize=["num_rows"])
def multiply_codes_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    in_features,
    out_features,
    part_size,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_PARTS: tl.constexpr,
):
    """Compute ROWS rows of a panel's outputs over the `part_size` tiles of a part."""
    panel = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin, end = part * part_size, tl.minimum((part + 1) * part_size, weight.num_tiles)
    total = sum_tiles(x, weight, row.to(tl.int64), row < num_rows, in_features, panel, begin, end, FORM, ROWS)
    output = panel * FORM.outputs + tl.arange(0, FORM.outputs)
    store_tile(total, bias, out, output, row, part, num_rows, out_features, HAS_PARTS)


def launch(x: Tensor, weight: PackedCodes, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x W^T + bias as `dtype`, [num_rows, out_features]. x: contiguous [num_rows, in_features].
    bias: [out_features]."""
    num_rows, in_features = x.shape
    assert x.is_contiguous(), "rows are contiguous"
    num_parts = count_parts(weight)
    has_parts = num_parts > 1
    shape = (num_parts, num_rows, weight.out_features) if has_parts else (num_rows, weight.out_features)
    out = torch.empty(shape, dtype=torch.float32 if has_parts else dtype, device=x.device)
    if not num_rows:
        return add_parts.launch(out, bias, dtype) if has_parts else out
    rows = next((rows for rows in STAGES if rows >= num_rows), max(STAGES))
    multiply_codes_kernel[(triton.cdiv(num_rows, rows), weight.num_panels, num_parts)](
        x,
        CodeArguments.of(weight),
        None if has_parts else bias,
        out,
        num_rows,
        in_features,
        weight.out_features,
        triton.cdiv(weight.num_tiles, num_parts),
        FORM=CodeForm.of(weight),
        ROWS=rows,
        HAS_PARTS=has_parts,
        num_warps=NUM_WARPS,
        num_stages=STAGES[rows],
    )
    return add_parts.launch(out, bias, dtype) if has_parts else out


def count_parts(weight: PackedCodes) -> int:
    """Return the number of programs that share the columns of a panel, so that few panels keep a GPU busy."""
    num_parts = 1
    while (
        num_parts < MAX_PARTS
        and num_parts * weight.num_panels < WANTED_PROGRAMS
        and weight.num_tiles >= 2 * num_parts * MIN_TILES
    ):
        num_parts *= 2
    return num_parts


def plain(x: Tensor, weight: PackedCodes, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = F.linear(x.float(), widen(weight, torch.float32))
    return (y if bias is None else y + bias.float()).to(dtype)
