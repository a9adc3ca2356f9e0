"""Layer norm and RMS norm of the residual stream, fused with the preceding addition."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

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
):
    """Normalise row `program_id(0)`. BLOCK is the next power of two of SIZE."""
    first = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, BLOCK)
    mask = at < SIZE
    value = tl.load(x + first + at, mask=mask, other=0.0)  # [BLOCK]
    scale = tl.load(
        weight + at, mask=mask, other=0.0
    )  # loaded before the sums, so that they do not wait for it
    if HAS_DELTA:
        added = tl.load(delta + first + at, mask=mask, other=0.0)
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
) -> Tensor:
    """Return the norm of x + delta as `dtype`, [num_tokens, size]: layer norm if `is_centred`, else RMS norm.
    Overwrites x with the sum if there is a delta, which may have another type than x.

    weight, bias: float32 [size]. x, delta: contiguous [num_tokens, size]. Computes in float32."""
    num_tokens, size = x.shape
    assert x.is_contiguous(), "rows are contiguous"
    assert delta is None or (delta.is_contiguous() and delta.shape == x.shape), (
        "x and delta have equal shapes"
    )
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
        num_warps=num_warps,
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
) -> Tensor:
    if delta is not None:
        x += delta
    if is_centred:
        return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(dtype)
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(dtype)
