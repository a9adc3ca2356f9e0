"""Relative position bias: a learned number for each head and bucket of distances, as a table by distance."""

import math

import torch
from torch import Tensor

from tgis.shard.layers.ops import Parts
from tgis.shard.models.spec.seq2seq_spec import RelativeBias


def read_bias(parts: Parts, path: str, bias: RelativeBias, num_heads: int, causal: bool) -> Tensor:
    """float32 [own heads, 2 * reach + 1], for `Scoring.bias`; distances beyond have the last one's. Raises
    WeightsError."""
    stored = parts.weights.find(f"{path}.weight", (bias.num_buckets, num_heads))
    table = stored.read(columns=parts.world.slice(num_heads)).to(parts.dtype).float()  # [buckets, own heads]
    reach = max(bias.num_buckets, bias.max_distance)
    buckets = find_buckets(torch.arange(-reach, reach + 1), bias, causal)
    return table[buckets].T.contiguous().to(parts.kernels.device)


def find_buckets(distance: Tensor, bias: RelativeBias, causal: bool) -> Tensor:
    """int64 [n], of distances int64 [n], the key's position less the query's.

    Half of the buckets are for single distances, the others ever wider. A causal query sees no key behind it;
    otherwise those have the second half of all buckets."""
    if causal:
        return _bucket(-distance.clamp(max=0), bias.num_buckets, bias.max_distance)
    half = bias.num_buckets // 2
    return _bucket(distance.abs(), half, bias.max_distance) + (distance > 0) * half


def _bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """distance: not negative."""
    num_single = num_buckets // 2
    # In float32, because a bucket's edge is where that rounds to.
    share = torch.log(distance.clamp(min=1).float() / num_single) / math.log(max_distance / num_single)
    wide = num_single + (share * (num_buckets - num_single)).long()
    return torch.where(distance < num_single, distance, wide.clamp(max=num_buckets - 1))
