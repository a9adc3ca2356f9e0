"""Mamba 2 in plain torch operators, one token after the other: the reference of other implementations."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tgis.shard.layers.states import Mamba2
from tgis.shard.memory.state_cache import StepStates


def mix_states(rows: Tensor, mixer: Mamba2, layer: int, states: StepStates) -> Tensor:
    """Implement `Kernels.mix_states`."""
    sizes = mixer.sizes
    parts = [sizes.width, sizes.num_channels, sizes.num_heads]
    _, channels, times = torch.split(rows.float(), parts, -1)
    windows, sums = states.cache.windows(layer), states.cache.sums(layer)
    out = torch.empty(len(rows), sizes.width, device=rows.device)
    spans = pairwise(states.begins.tolist())
    for slot, (begin, end) in zip(states.slots.tolist(), spans, strict=True):
        mixed = _convolve(channels[begin:end], mixer, windows[slot])
        out[begin:end] = _scan(mixed, times[begin:end], mixer, sums[slot])
    return out


def gate_norm(x: Tensor, rows: Tensor, mixer: Mamba2) -> Tensor:
    """Implement `Kernels.gate_norm`."""
    x *= F.silu(rows[:, : mixer.sizes.width].float())
    groups = x.view(len(x), mixer.sizes.num_groups, -1)
    return x.copy_(F.rms_norm(groups, groups.shape[2:], eps=mixer.eps).flatten(1) * mixer.norm_weight)


def _convolve(x: Tensor, mixer: Mamba2, window: Tensor) -> Tensor:
    """Return the convolution of a sequence's new tokens, [count, num_channels], and update its window."""
    count = len(x)
    inputs = torch.cat([window, x])
    terms = [inputs[i : i + count] * weight for i, weight in enumerate(mixer.kernel)]
    window.copy_(inputs[count:])
    return F.silu(torch.stack(terms).sum(0) + mixer.kernel_bias)


def _scan(channels: Tensor, times: Tensor, mixer: Mamba2, sums: Tensor) -> Tensor:
    """Return y of a sequence's new tokens, [count, width], and update its sums."""
    sizes = mixer.sizes
    x, left, right = torch.split(channels, [sizes.width, sizes.group_width, sizes.group_width], -1)
    x = x.reshape(len(x), sizes.num_heads, -1, sizes.block)  # [count, num_heads, num_blocks, block]
    per_group = sizes.num_heads // sizes.num_groups
    # [count, num_heads, state_size]
    left, right = (
        each.reshape(len(x), sizes.num_groups, -1).repeat_interleave(per_group, 1) for each in (left, right)
    )
    steps = F.softplus(times + mixer.time_bias).clamp(mixer.min_step, mixer.max_step)  # [count, num_heads]
    decays = torch.exp(steps * mixer.decay)
    out = torch.empty_like(x)
    for t in range(len(x)):
        sums *= decays[t, :, None, None, None]
        sums += left[t, :, None, :, None] * (x[t] * steps[t, :, None, None]).unsqueeze(2)
        out[t] = (sums * right[t, :, None, :, None]).sum(2)
    return (out + x * mixer.skip[:, None, None]).flatten(1)
