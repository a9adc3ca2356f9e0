"""End of products of few rows: a program stores the sums of its outputs and rows."""

import triton
import triton.language as tl


@triton.jit
def store_tile(total, bias, out, output, row, part, num_rows, out_features, HAS_PARTS: tl.constexpr):
    """Add the bias to sums, float32 [num_outputs of a program, its rows], and store them as `out`,
    [num_rows, out_features], or as part `part` of it, [num_parts, num_rows, out_features]."""
    is_output = output < out_features
    if bias is not None:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    place = row.to(tl.int64)
    if HAS_PARTS:
        place += part.to(tl.int64) * num_rows
    places = place[None, :] * out_features + output[:, None]
    is_inside = is_output[:, None] & (row < num_rows)[None, :]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=is_inside)
