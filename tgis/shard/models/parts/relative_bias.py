"""Relative position bias of T5 (Raffel et al., 2020): one learned number per head and bucket of distances."""

import math

import torch
from torch import Tensor

from tgis.shard.layers.ops import Parts
from tgis.shard.models.spec import RelativeBias


def read_bias(parts: Parts, path: str, bias: RelativeBias, num_heads: int, causal: bool) -> Tensor:
    """Return float32 [own heads, 2 * reach + 1] for `Scoring.bias`. Raises WeightsError."""
    shape = (bias.num_buckets, num_heads)
    columns = parts.group.slice(num_heads)
    table = parts.read_table(path, shape, columns=columns).float()  # [buckets, own heads]
    reach = max(bias.num_buckets, bias.max_distance)
    buckets = find_buckets(torch.arange(-reach, reach + 1), bias, causal)
    return table[buckets].T.contiguous().to(parts.kernels.device)


def find_buckets(distance: Tensor, bias: RelativeBias, causal: bool) -> Tensor:
    """Return the buckets, int64 [n], of distances, int64 [n]: the key's position minus the query's.

    Half of the buckets hold one distance each; the widths of the others grow logarithmically. Without a
    causal mask, later keys use the second half of all buckets."""
    if causal:
        return _bucket(-distance.clamp(max=0), bias.num_buckets, bias.max_distance)
    half = bias.num_buckets // 2
    return _bucket(distance.abs(), half, bias.max_distance) + (distance > 0) * half


def _bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    num_single = num_buckets // 2
    # float32, as in training: its rounding decides where a bucket begins.
    share = torch.log(distance.clamp(min=1).float() / num_single) / math.log(max_distance / num_single)
    wide = num_single + (share * (num_buckets - num_single)).long()
    return torch.where(distance < num_single, distance, wide.clamp(max=num_buckets - 1))
