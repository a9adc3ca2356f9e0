"""Activations of feed-forward layers, gated or not."""

from torch import Tensor

from tgis.shard.kernels.portable.ops import ACTIVATIONS


def launch(x: Tensor, name: str, is_gated: bool) -> Tensor:
    """Return an `Activation` of contiguous x as a new tensor of its type: [num_tokens, size], or if it is
    gated [num_tokens, 2 * size] -> [num_tokens, size]. Computed in float32."""
    raise NotImplementedError


def plain(x: Tensor, name: str, is_gated: bool) -> Tensor:
    if not is_gated:
        return ACTIVATIONS[name](x.float()).to(x.dtype)
    gate, up = x.float().chunk(2, -1)
    return (ACTIVATIONS[name](gate) * up).to(x.dtype)
