"""Mamba 2 in plain torch operators, for any device: products of matrices for chunks of tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tgis.shard.kernels.portable.convolution import convolve
from tgis.shard.layers.states import Mamba2
from tgis.shard.memory.state_cache import StepStates

CHUNK = 64  # tokens; the decays between all pairs of them are in memory at once


def mix_states(rows: Tensor, mixer: Mamba2, layer: int, states: StepStates) -> Tensor:
    """Implement `Kernels.mix_states`."""
    sizes = mixer.sizes
    parts = [sizes.width, sizes.num_channels, sizes.num_heads]
    _, channels, times = torch.split(rows.float(), parts, -1)
    windows, sums = states.cache.windows(layer), states.cache.sums(layer)
    out = torch.empty(len(rows), sizes.width, device=rows.device)
    for source, slot, begin, end in states.list_spans():
        if source != slot:
            windows[slot], sums[slot] = windows[source], sums[source]
        mixed = convolve(channels[begin:end], mixer.kernel, mixer.kernel_bias, windows[slot])
        out[begin:end] = _scan(mixed, times[begin:end], mixer, sums[slot])
    return out


def gate_norm(x: Tensor, rows: Tensor, mixer: Mamba2) -> Tensor:
    """Implement `Kernels.gate_norm`."""
    gate = F.silu(rows[:, : mixer.sizes.width].float())
    if mixer.gating == "after_norm":
        return x.copy_(_norm(x, mixer) * gate)
    x *= gate
    return x if mixer.gating == "no_norm" else x.copy_(_norm(x, mixer))


def _norm(x: Tensor, mixer: Mamba2) -> Tensor:
    groups = x.view(len(x), mixer.sizes.num_groups, -1)
    return F.rms_norm(groups, groups.shape[2:], eps=mixer.eps).flatten(1) * mixer.norm_weight


def _scan(channels: Tensor, times: Tensor, mixer: Mamba2, sums: Tensor) -> Tensor:
    """Return y of a sequence's new tokens, [count, width], and update its sums."""
    sizes = mixer.sizes
    num_heads = sizes.num_heads
    per_group = sizes.num_heads // sizes.num_groups
    x, left, right = torch.split(channels, [sizes.width, sizes.group_width, sizes.group_width], -1)
    x = x.reshape(len(x), num_heads, sizes.head_dim).transpose(0, 1)  # [num_heads, count, head_dim]
    left, right = (  # [num_heads, count, state_size]
        each.reshape(len(each), sizes.num_groups, -1).repeat_interleave(per_group, 1).transpose(0, 1)
        for each in (left, right)
    )
    steps = F.softplus(times + mixer.time_bias).clamp(mixer.min_step, mixer.max_step).T  # [num_heads, count]
    state = sums.transpose(1, 2).reshape(num_heads, sizes.state_size, sizes.head_dim)
    parts = []
    for start in range(0, len(channels), CHUNK):
        at = slice(start, start + CHUNK)
        y, state = _scan_chunk(x[:, at], left[:, at], right[:, at], steps[:, at], mixer.decay, state)
        parts.append(y)
    sums.copy_(state.view(num_heads, sizes.state_size, -1, sizes.block).transpose(1, 2))
    return (torch.cat(parts, 1) + x * mixer.skip[:, None, None]).transpose(0, 1).flatten(1)


def _scan_chunk(
    x: Tensor, left: Tensor, right: Tensor, steps: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y of a chunk, [num_heads, count, head_dim], and the state after it. A token's input reaches a
    later token's output reduced by all decays between them."""
    scaled = x * steps.unsqueeze(2)
    # Logarithm of the decay since the chunk's begin. Differences of sums would lose digits in float32.
    total = (steps * decay.unsqueeze(1)).double().cumsum(1)
    between = (
        (total.unsqueeze(2) - total.unsqueeze(1)).tril().exp().tril().float()
    )  # [num_heads, count, count]
    y = (right @ left.transpose(1, 2) * between) @ scaled + (right * total.exp().float().unsqueeze(2)) @ state
    rest = (total[:, -1:] - total).exp().float()  # [num_heads, count]
    state = state * total[:, -1:, None].exp().float() + (left * rest.unsqueeze(2)).transpose(1, 2) @ scaled
    return y, state
