"""Activations of feed-forward layers, gated or not."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgis.shard.kernels.cuda.functions.dependent_launch import is_dependent, wait_for_inputs
from tgis.shard.kernels.portable.ops import ACTIVATIONS, multiply_gated

BLOCK, NUM_WARPS = 1024, 4


@triton.jit
def _gate(
    x,
    out,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NAME: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Compute BLOCK columns of row `program_id(0)`. SIZE is the number of columns of `out`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < SIZE
    begin = row * SIZE
    if IS_GATED:
        begin *= 2
    if IS_DEPENDENT:
        wait_for_inputs()
    value = tl.load(x + begin + at, mask=mask).to(tl.float32)  # [BLOCK]
    if IS_GATED:
        value = _multiply(value, tl.load(x + begin + SIZE + at, mask=mask).to(tl.float32), NAME)
    else:
        value = _activate(value, NAME)
    tl.store(out + row * SIZE + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _multiply(gate, up, NAME: tl.constexpr):
    if NAME == "clamped_swiglu":
        # Unlike tl.clamp, this keeps NaN.
        gate = _activate(tl.where(gate > 7.0, 7.0, gate), "quick_gelu")
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
    else:
        gate = _activate(gate, NAME)
    return gate * up


@triton.jit
def _activate(x, NAME: tl.constexpr):
    if NAME == "silu":
        y = x * tl.sigmoid(x)
    elif NAME == "quick_gelu":
        y = x * tl.sigmoid(1.702 * x)
    elif NAME == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u). Triton's interpreter does not support tanh.
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x * tl.sigmoid(2.0 * u)
    elif NAME == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(NAME == "relu" or NAME == "relu2", "unknown activation")
        # Unlike tl.maximum, this keeps NaN.
        y = tl.where(x < 0.0, 0.0, x)
        if NAME == "relu2":
            y = y * y
    return y


def launch(x: Tensor, name: str, is_gated: bool) -> Tensor:
    """Return an `Activation` of contiguous x, computed in float32, in the type of x: [num_tokens, size] ->
    same shape or, if gated, [num_tokens, 2 * size] -> [num_tokens, size]."""
    assert x.is_contiguous(), "rows are contiguous"
    num_tokens = x.shape[0]
    size = x.shape[1] // (1 + is_gated)
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(size, BLOCK))
        is_early = is_dependent(x.device)
        _gate[grid](
            x,
            out,
            SIZE=size,
            BLOCK=BLOCK,
            NAME=name,
            IS_GATED=is_gated,
            IS_DEPENDENT=is_early,
            num_warps=NUM_WARPS,
            launch_pdl=is_early,
        )
    return out


def plain(x: Tensor, name: str, is_gated: bool) -> Tensor:
    if not is_gated:
        return ACTIVATIONS[name](x.float()).to(x.dtype)
    gate, up = x.float().chunk(2, -1)
    return multiply_gated(gate, up, name).to(x.dtype)
