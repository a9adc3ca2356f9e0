"""Scaling of queries by position, which keeps the softmax sharp over long sequences (Nakanishi,
"Scalable-Softmax Is Superior for Attention", 2025)."""

import torch
from torch import Tensor

from tgis.shard.models.spec import QueryScaling


def query_factors(positions: Tensor, scaling: QueryScaling) -> Tensor:
    """Return the factors of queries at positions, int64 [num_tokens]: float32 [num_tokens, 1]."""
    periods = torch.div(positions + scaling.shift, scaling.length, rounding_mode="floor")
    return (1 + scaling.beta * torch.log1p(periods.float())).unsqueeze(1)
