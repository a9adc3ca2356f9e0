"""Layer norm and RMS norm of the residual stream, fused with the preceding addition."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tgis.shard.kernels.cuda.few_rows.add_parts import sum_in_order
from tgis.shard.kernels.cuda.functions.dependent_launch import is_dependent, wait_for_inputs

ELEMENTS_PER_WARP = 512
MAX_WARPS = 16


@triton.jit
def _norm(
    x,
    delta,
    weight,
    bias,
    out,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    ROUNDS_DELTA: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Normalise row `program_id(0)`. BLOCK is the next power of two of SIZE. With NUM_PARTS, delta is the sum
    of as many parts."""
    first = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, BLOCK)
    mask = at < SIZE
    # Loaded before the sums, so that they do not wait for it.
    scale = tl.load(weight + at, mask=mask, other=0.0)
    if IS_DEPENDENT:
        wait_for_inputs()
    value = tl.load(x + first + at, mask=mask, other=0.0)  # [BLOCK]
    if HAS_DELTA:
        added = tl.load(delta + first + at, mask=mask, other=0.0)
        for part in tl.static_range(1, NUM_PARTS):
            place = part * tl.num_programs(0).to(tl.int64) * SIZE + first
            added += tl.load(delta + place + at, mask=mask, other=0.0)
        if ROUNDS_DELTA:
            added = added.to(tl.bfloat16)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + first + at, value, mask=mask)
    value = value.to(tl.float32)
    if IS_CENTRED:
        value = tl.where(mask, value - tl.sum(value, 0) / SIZE, 0.0)
    variance = tl.sum(value * value, 0) / SIZE
    value = value * tl.rsqrt(variance + eps) * scale
    if HAS_BIAS:
        value += tl.load(bias + at, mask=mask, other=0.0)
    tl.store(out + first + at, value.to(out.dtype.element_ty), mask=mask)


def launch(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    is_centred: bool,
    dtype: torch.dtype,
    delta_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the norm of x + delta as `dtype`, [num_tokens, size]: layer norm if `is_centred`, else RMS norm.
    Overwrites x with the sum if there is a delta, which may have another type than x.

    weight, bias: float32 [size]. x, delta: contiguous [num_tokens, size]. Computes in float32. If delta has
    parts, float32 [num_parts, num_tokens, size], their sum is rounded to `delta_dtype`, float32
    or bfloat16."""
    num_tokens, size = x.shape
    assert x.is_contiguous(), "rows are contiguous"
    assert delta is None or (delta.is_contiguous() and delta.shape[-2:] == x.shape), (
        "x and delta have equal shapes"
    )
    has_parts = delta is not None and delta.dim() == 3
    assert not has_parts or delta_dtype in (torch.float32, torch.bfloat16), "sums of parts have another type"
    num_parts = 1 if delta is None or delta.dim() == 2 else len(delta)
    is_early = is_dependent(x.device)
    out = torch.empty(num_tokens, size, dtype=dtype, device=x.device)
    if not num_tokens:
        return out
    block = triton.next_power_of_2(size)
    num_warps = min(max(1, block // ELEMENTS_PER_WARP), MAX_WARPS)
    _norm[(num_tokens,)](
        x,
        delta,
        weight,
        bias,
        out,
        eps,
        SIZE=size,
        BLOCK=block,
        HAS_DELTA=delta is not None,
        HAS_BIAS=bias is not None,
        IS_CENTRED=is_centred,
        NUM_PARTS=num_parts,
        ROUNDS_DELTA=has_parts and delta_dtype == torch.bfloat16,
        IS_DEPENDENT=is_early,
        num_warps=num_warps,
        launch_pdl=is_early,
    )
    return out


def plain(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    is_centred: bool,
    dtype: torch.dtype,
    delta_dtype: torch.dtype | None = None,
) -> Tensor:
    if delta is not None and delta.dim() == 3:
        delta = sum_in_order(delta).to(delta_dtype)
    if delta is not None:
        x += delta
    if is_centred:
        return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(dtype)
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(dtype)
