"""Causal convolution of recurrent layers in plain torch operators."""

import torch
import torch.nn.functional as F
from torch import Tensor


def convolve(x: Tensor, kernel: Tensor, bias: Tensor, window: Tensor) -> Tensor:
    """Return silu of the convolution of a sequence's new tokens, [count, num_channels], and update its
    window. kernel: [kernel_size, num_channels]."""
    count = len(x)
    inputs = torch.cat([window, x])
    terms = [inputs[i : i + count] * weight for i, weight in enumerate(kernel)]
    window.copy_(inputs[count:])
    return F.silu(torch.stack(terms).sum(0) + bias)
