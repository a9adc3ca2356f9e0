"""Products with codes. Tensor cores multiply the numbers of codes, which are exact in 16 bits except for
those of some tables, and each group's sum is multiplied by its scale in float32.

The sums of a row have the same order however many rows there are: tiles in order within a part of the
columns, and then the parts in order. The number of parts depends on the matrix only."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tgis.shard.kernels.cuda.codes.numbers import find_numbers
from tgis.shard.kernels.cuda.codes.packed import OUTPUTS, PackedCodes
from tgis.shard.kernels.cuda.codes.widen_codes import plain as widen

MAX_ROWS = 512
"""Maximum rows for which codes are converted anew for each group of rows. For more rows, it takes less time
to write the weights to memory as floats, once, and multiply those."""
NUM_WARPS = 4
STAGES = {16: 4, 32: 4, 64: 3, 128: 2}  # rows of x that a program multiplies -> tiles in shared memory
MAX_SUMMED = 64
WANTED_PROGRAMS, MAX_PARTS, MIN_TILES = 256, 8, 4
BLOCK, ADD_WARPS = 1024, 4
_COUNTS = ["num_rows", "num_tiles", "part_size", "num_groups", "pieces_per_group"]


@triton.jit
def _load_half(x, order, row, is_row, in_features, first, PIECE: tl.constexpr, HAS_ORDER: tl.constexpr):
    """Return columns `first` and the following of x, transposed: [PIECE, ROWS]."""
    column = first + tl.arange(0, PIECE)
    if HAS_ORDER:
        column = tl.load(order + column)
        is_column = column >= 0
    else:
        is_column = column < in_features
    places = row[None, :] * in_features + column[:, None]
    return tl.load(x + places, mask=is_column[:, None] & is_row[None, :], other=0.0)


@triton.jit
def _load_plane(planes, piece, pieces_per_group, output, OUTPUTS: tl.constexpr, HAS_PLANE: tl.constexpr):
    """Return the scales, zeros or offsets of a piece, float32 [OUTPUTS], or 0."""
    result = 0.0
    if HAS_PLANE:
        result = tl.load(planes + piece // pieces_per_group * OUTPUTS + output).to(tl.float32)
    return result


@triton.jit(do_not_specialize=_COUNTS)
def multiply_codes_kernel(
    x,
    codes,
    scales,
    zeros,
    offsets,
    table,
    order,
    bias,
    out,
    num_rows,
    in_features,
    out_features,
    num_tiles,
    part_size,
    num_groups,
    pieces_per_group,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PIECE: tl.constexpr,
    BITS: tl.constexpr,
    CENTRE: tl.constexpr,
    NUMBERS: tl.constexpr,
    SHARES_SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_PARTS: tl.constexpr,
):
    """Compute ROWS rows of a panel's outputs, [OUTPUTS, ROWS], over the `part_size` tiles of a part."""
    panel, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row, row = row < num_rows, row.to(tl.int64)
    output = tl.arange(0, OUTPUTS)
    HALF_BYTES: tl.constexpr = OUTPUTS * PIECE
    TILE_BYTES: tl.constexpr = HALF_BYTES * BITS // 4
    codes += panel * num_tiles * TILE_BYTES
    code_at = output[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    plane_at = panel * num_groups * OUTPUTS + output
    first, end = part * part_size, tl.minimum((part + 1) * part_size, num_tiles)
    # Those of the next tile are loaded before the current one is multiplied.
    scale = _load_plane(scales, 2 * first, pieces_per_group, plane_at, OUTPUTS, True)
    zero = _load_plane(zeros, 2 * first, pieces_per_group, plane_at, OUTPUTS, HAS_ZEROS)
    offset = _load_plane(offsets, 2 * first, pieces_per_group, plane_at, OUTPUTS, HAS_OFFSETS)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for tile in range(first, end):
        packed = tl.load(codes + tile * TILE_BYTES + code_at).to(tl.int32)
        if BITS == 4:
            other = packed >> 4
            packed = packed & 15
        else:
            other = tl.load(codes + tile * TILE_BYTES + HALF_BYTES + code_at).to(tl.int32)
        later = tl.minimum(2 * tile + 1 + SHARES_SCALES, 2 * num_tiles - 1)
        next_scale = _load_plane(scales, later, pieces_per_group, plane_at, OUTPUTS, True)
        next_zero = _load_plane(zeros, later, pieces_per_group, plane_at, OUTPUTS, HAS_ZEROS)
        next_offset = _load_plane(offsets, later, pieces_per_group, plane_at, OUTPUTS, HAS_OFFSETS)
        x_half = _load_half(x, order, row, is_row, in_features, 2 * tile * PIECE, PIECE, HAS_ORDER)
        number = find_numbers(packed, zero, table, CENTRE, NUMBERS, HAS_ZEROS)
        sums = tl.dot(number.to(x_half.dtype), x_half, input_precision="ieee")
        if HAS_OFFSETS:
            total += offset[:, None] * tl.sum(x_half.to(tl.float32), 0)[None, :]
        if not SHARES_SCALES:
            total += sums * scale[:, None]
            scale, zero, offset = next_scale, next_zero, next_offset
            later = tl.minimum(2 * tile + 2, 2 * num_tiles - 1)
            next_scale = _load_plane(scales, later, pieces_per_group, plane_at, OUTPUTS, True)
            next_zero = _load_plane(zeros, later, pieces_per_group, plane_at, OUTPUTS, HAS_ZEROS)
            next_offset = _load_plane(offsets, later, pieces_per_group, plane_at, OUTPUTS, HAS_OFFSETS)
            sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
        x_half = _load_half(x, order, row, is_row, in_features, (2 * tile + 1) * PIECE, PIECE, HAS_ORDER)
        number = find_numbers(other, zero, table, CENTRE, NUMBERS, HAS_ZEROS)
        sums = tl.dot(number.to(x_half.dtype), x_half, sums, input_precision="ieee")
        if HAS_OFFSETS:
            total += offset[:, None] * tl.sum(x_half.to(tl.float32), 0)[None, :]
        total += sums * scale[:, None]
        scale, zero, offset = next_scale, next_zero, next_offset
    column = panel * OUTPUTS + output
    is_column = column < out_features
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if HAS_PARTS:
        row += part.to(tl.int64) * num_rows
    places = row[None, :] * out_features + column[:, None]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=is_column[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def add_parts_kernel(
    parts, bias, out, num_rows, out_features, num_parts, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the parts of BLOCK columns of row `program_id(0)` in order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < out_features
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(num_parts):
        total += tl.load(parts + (part * num_rows + row) * out_features + column, mask=is_column, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + row * out_features + column, total.to(out.dtype.element_ty), mask=is_column)


def launch(x: Tensor, weight: PackedCodes, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x W^T + bias as `dtype`, [num_rows, out_features]. x: contiguous [num_rows, in_features].
    bias: [out_features]."""
    num_rows, in_features = x.shape
    assert x.is_contiguous(), "rows are contiguous"
    out = torch.empty(num_rows, weight.out_features, dtype=dtype, device=x.device)
    if not num_rows:
        return out
    num_parts = count_parts(weight)
    parts = out
    if num_parts > 1:
        parts = torch.empty(num_parts * num_rows, weight.out_features, dtype=torch.float32, device=x.device)
    rows = next((rows for rows in list_rows(weight) if rows >= num_rows), list_rows(weight)[-1])
    multiply_codes_kernel[(triton.cdiv(num_rows, rows), weight.num_panels, num_parts)](
        *(x, weight.codes, weight.scales, weight.zeros, weight.offsets, weight.table, weight.order),
        bias if num_parts == 1 else None,
        parts,
        *(num_rows, in_features, weight.out_features),
        *(weight.num_tiles, triton.cdiv(weight.num_tiles, num_parts)),
        *(weight.num_groups, weight.pieces_per_group),
        ROWS=rows,
        OUTPUTS=OUTPUTS,
        PIECE=weight.piece,
        BITS=weight.bits,
        CENTRE=weight.centre,
        NUMBERS=weight.numbers,
        SHARES_SCALES=weight.shares_scales,
        HAS_ZEROS=weight.zeros is not None,
        HAS_OFFSETS=weight.offsets is not None,
        HAS_ORDER=weight.order is not None,
        HAS_BIAS=bias is not None and num_parts == 1,
        HAS_PARTS=num_parts > 1,
        num_warps=NUM_WARPS,
        num_stages=STAGES[rows],
    )
    if num_parts > 1:
        add_parts_kernel[(num_rows, triton.cdiv(weight.out_features, BLOCK))](
            *(parts, bias, out, num_rows, weight.out_features, num_parts),
            HAS_BIAS=bias is not None,
            BLOCK=BLOCK,
            num_warps=ADD_WARPS,
        )
    return out


def list_rows(weight: PackedCodes) -> list[int]:
    """Return the numbers of rows that a program may multiply, in order. With offsets, the sums of many rows of x
    need more registers than there are."""
    return [rows for rows in STAGES if weight.offsets is None or rows <= MAX_SUMMED]


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
