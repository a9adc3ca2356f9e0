"""Gated DeltaNet in plain torch operators, for any device, token by token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tgis.shard.kernels.portable.convolution import convolve
from tgis.shard.layers.states import DeltaNet
from tgis.shard.memory.state_cache import StateSizes, StepStates

EPS = 1e-6  # of the length of queries and keys


def mix_delta(rows: Tensor, gates: Tensor, mixer: DeltaNet, layer: int, states: StepStates) -> Tensor:
    """Implement `Kernels.mix_delta`."""
    sizes = mixer.sizes
    gate, channels = torch.split(rows.float(), [sizes.width, sizes.num_channels], -1)
    decays, strengths = _find_factors(gates.float(), mixer)
    windows, sums = states.cache.windows(layer), states.cache.sums(layer)
    y = torch.empty(len(rows), sizes.num_heads, sizes.head_dim, device=rows.device)
    for source, slot, begin, end in states.list_spans():
        if source != slot:
            windows[slot], sums[slot] = windows[source], sums[source]
        at = slice(begin, end)
        mixed = convolve(channels[at], mixer.kernel, mixer.kernel_bias, windows[slot])
        y[at] = _advance(*_split(mixed, sizes), decays[at], strengths[at], sizes, sums[slot])
    y = F.rms_norm(y, y.shape[2:], mixer.norm_weight, mixer.eps).flatten(1)
    return y * F.silu(gate)


def _find_factors(gates: Tensor, mixer: DeltaNet) -> tuple[Tensor, Tensor]:
    """Return the decays of sums and the strengths of updates, [num_tokens, num_heads] each."""
    first = mixer.first_head
    count = mixer.sizes.num_heads
    strengths, times = (each[:, first : first + count] for each in torch.split(gates, mixer.total_heads, -1))
    return torch.exp(mixer.decay * F.softplus(times + mixer.time_bias)), torch.sigmoid(strengths)


def _split(channels: Tensor, sizes: StateSizes) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys, both [count, num_heads, state_size], and values, [count, num_heads, head_dim]."""
    widths = [sizes.group_width, sizes.group_width, sizes.width]
    queries, keys, values = torch.split(channels, widths, -1)
    per_group = sizes.num_heads // sizes.num_groups
    queries, keys = (
        (heads * (heads.square().sum(-1, keepdim=True) + EPS).rsqrt()).repeat_interleave(per_group, 1)
        for heads in (each.reshape(len(each), sizes.num_groups, -1) for each in (queries, keys))
    )
    return queries * sizes.state_size**-0.5, keys, values.reshape(len(values), sizes.num_heads, -1)


def _advance(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    strengths: Tensor,
    sizes: StateSizes,
    sums: Tensor,
) -> Tensor:
    """Return y of a sequence's new tokens, [count, num_heads, head_dim], and update its sums."""
    state = sums.transpose(1, 2).reshape(sizes.num_heads, sizes.state_size, sizes.head_dim)
    y = torch.empty_like(values)
    for t, (query, key, value) in enumerate(zip(queries, keys, values, strict=True)):
        state = state * decays[t, :, None, None]
        known = (key.unsqueeze(1) @ state).squeeze(1)  # [num_heads, head_dim]
        delta = (value - known) * strengths[t, :, None]
        state = state + key.unsqueeze(2) * delta.unsqueeze(1)
        y[t] = (query.unsqueeze(1) @ state).squeeze(1)
    sums.copy_(state.view(sizes.num_heads, sizes.state_size, -1, sizes.block).transpose(1, 2))
    return y
