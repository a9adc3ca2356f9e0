"""Products of few rows with a matrix of floats, limited by the time to read the matrix.

A program multiplies a tile of outputs by all rows, over a part of the columns. The numbers of parts and of
rows that a program computes depend on the matrix only, so a row's sums have the same order however many rows
there are: tiles in order within a part, and then the parts in order. Before a program waits for the kernel
that computes x, it reads its first tiles of the matrix into the second-level cache."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tgis.shard.kernels.cuda.few_rows import add_parts
from tgis.shard.kernels.cuda.few_rows.store_tile import store_tile
from tgis.shard.kernels.cuda.functions.dependent_launch import is_dependent, prefetch, wait_for_inputs

MAX_ROWS = 16
OUTPUTS, TILE = 64, 64  # of a program, and columns that it multiplies at a time: 128 bytes of each output
NUM_WARPS, NUM_STAGES = 4, 5
PREFETCHED = 4  # tiles
MAX_PROGRAMS, MAX_PARTS, MIN_TILES = 528, 8, 4
"""Four programs of 50 KiB fit into a processor, and an H200 has 132 processors."""


@triton.jit(do_not_specialize=["num_rows", "part_size"])
def multiply_few_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    in_features,
    out_features,
    part_size,
    OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    PREFETCHED: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Compute all rows of OUTPUTS outputs over the `part_size` tiles of a part."""
    part = tl.program_id(1)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row, inner = tl.arange(0, ROWS), tl.arange(0, TILE)
    num_tiles = tl.cdiv(in_features, TILE)
    begin, end = part * part_size, tl.minimum((part + 1) * part_size, num_tiles)
    # Outputs beyond the last are computed from it, and not stored.
    own = weight + tl.minimum(output, out_features - 1).to(tl.int64)[:, None] * in_features
    if IS_DEPENDENT:
        ahead = tl.minimum(begin + tl.arange(0, PREFETCHED), end - 1)
        prefetch(own + ahead[None, :] * TILE)
        wait_for_inputs()
    is_row = (row < num_rows)[:, None]
    x += row[:, None] * in_features
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for tile in range(begin, end):
        column = (tile * TILE + inner)[None, :]
        is_column = column < in_features
        w_tile = tl.load(own + column, mask=is_column, other=0.0)  # [OUTPUTS, TILE]
        x_tile = tl.load(x + column, mask=is_row & is_column, other=0.0)  # [ROWS, TILE]
        total = tl.dot(w_tile, x_tile.T, total, input_precision="ieee")
    store_tile(total, bias, out, output, row, part, num_rows, out_features, HAS_PARTS)


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, keeps_parts: bool = False
) -> Tensor:
    """Return x W^T + bias as `dtype`, [num_rows, out_features], with sums in float32; or, if `keeps_parts`,
    the partial sums of x W^T, float32 [num_parts, num_rows, out_features].

    x: contiguous [at most MAX_ROWS, in_features]. weight: contiguous [out_features, in_features], of the type
    of x. bias: [out_features]."""
    num_rows, in_features = x.shape
    assert x.is_contiguous(), "rows are contiguous"
    assert weight.is_contiguous(), "outputs are contiguous"
    assert num_rows <= MAX_ROWS, "a program computes all rows"
    num_parts = count_parts(len(weight), in_features)
    has_parts = keeps_parts or num_parts > 1
    shape = (num_parts, num_rows, len(weight)) if has_parts else (num_rows, len(weight))
    out = torch.empty(shape, dtype=torch.float32 if has_parts else dtype, device=x.device)
    if num_rows:
        _multiply(x, weight, None if has_parts else bias, out, num_parts)
    return add_parts.launch(out, bias, dtype) if has_parts and not keeps_parts else out


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, num_parts: int) -> None:
    out_features, in_features = weight.shape
    is_early = is_dependent(x.device)
    multiply_few_kernel[(triton.cdiv(out_features, OUTPUTS), num_parts)](
        x,
        weight,
        bias,
        out,
        len(x),
        in_features,
        out_features,
        triton.cdiv(triton.cdiv(in_features, TILE), num_parts),
        OUTPUTS=OUTPUTS,
        TILE=TILE,
        ROWS=MAX_ROWS,
        HAS_PARTS=num_parts > 1,
        PREFETCHED=PREFETCHED,
        IS_DEPENDENT=is_early,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        launch_pdl=is_early,
    )


def count_parts(out_features: int, in_features: int) -> int:
    """Return the number of programs that share the columns of a tile of outputs, so that a matrix of few
    outputs keeps a GPU busy."""
    num_panels, num_tiles = triton.cdiv(out_features, OUTPUTS), triton.cdiv(in_features, TILE)
    num_parts = 1
    while (
        num_parts < MAX_PARTS
        and 2 * num_parts * num_panels <= MAX_PROGRAMS
        and num_tiles >= 2 * num_parts * MIN_TILES
    ):
        num_parts *= 2
    return int(triton.cdiv(num_tiles, triton.cdiv(num_tiles, num_parts)))  # none is empty


def plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, keeps_parts: bool = False
) -> Tensor:
    if keeps_parts:
        columns = triton.cdiv(triton.cdiv(x.shape[1], TILE), count_parts(*weight.shape)) * TILE
        pairs = zip(x.float().split(columns, 1), weight.float().split(columns, 1), strict=True)
        return torch.stack([F.linear(*pair) for pair in pairs])
    y = F.linear(x.float(), weight.float())
    return (y if bias is None else y + bias.float()).to(dtype)
