"""Layer norm and RMS norm of the residual stream, fused with the addition before."""

import torch
import torch.nn.functional as F
from torch import Tensor


def launch(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    is_centred: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Return the norm of x + delta as `dtype`, [num_tokens, size]: a layer norm if it is centred, else an RMS
    norm. With a delta, which may have another type than x, x is overwritten with the sum.

    weight and bias are float32 [size]. x and delta are contiguous. Sums are float32."""
    raise NotImplementedError


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
