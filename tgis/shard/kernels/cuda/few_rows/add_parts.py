"""Addition of the partial sums of products, in order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgis.shard.kernels.cuda.functions.dependent_launch import is_dependent, wait_for_inputs

BLOCK, NUM_WARPS = 1024, 4


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def add_parts_kernel(
    parts,
    bias,
    out,
    num_rows,
    out_features,
    num_parts,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Add the parts of BLOCK columns of row `program_id(0)` in order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < out_features
    if IS_DEPENDENT:
        wait_for_inputs()
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(num_parts):
        total += tl.load(parts + (part * num_rows + row) * out_features + column, mask=is_column, other=0.0)
    if bias is not None:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + row * out_features + column, total.to(out.dtype.element_ty), mask=is_column)


def launch(parts: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sum of parts, float32 [num_parts, num_rows, out_features], and bias, [out_features], as
    `dtype`."""
    num_parts, num_rows, out_features = parts.shape
    out = torch.empty(num_rows, out_features, dtype=dtype, device=parts.device)
    if not num_rows:
        return out
    is_early = is_dependent(parts.device)
    add_parts_kernel[(num_rows, triton.cdiv(out_features, BLOCK))](
        parts,
        bias,
        out,
        num_rows,
        out_features,
        num_parts,
        BLOCK=BLOCK,
        IS_DEPENDENT=is_early,
        num_warps=NUM_WARPS,
        launch_pdl=is_early,
    )
    return out


def plain(parts: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    total = sum_in_order(parts)
    return (total if bias is None else total + bias.float()).to(dtype)


def sum_in_order(parts: Tensor) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
