"""Products of cuBLAS with results of the operands' type or of float32."""

import torch
import torch.nn.functional as F
from torch import Tensor


def multiply_floats(x: Tensor, weight: Tensor, is_wide: bool) -> Tensor:
    """Return x W^T of operands of one type, as float32 if `is_wide`, else as this type."""
    if not is_wide or x.dtype == torch.float32:
        return F.linear(x, weight)
    return multiply_wide(x, weight)


def multiply_wide(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T of 16-bit operands as float32."""
    if x.device.type == "cuda":
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())
