"""Launches the kernels of a gated DeltaNet layer."""

from collections.abc import Callable

from torch import Tensor

from tgis.shard.kernels.cpu.delta_net import kernels
from tgis.shard.kernels.cpu.jit.compiler import Kernel, as_bits, empty
from tgis.shard.kernels.cpu.states.launch import FEW, convolve, find_targets
from tgis.shard.layers.states import DeltaNet
from tgis.shard.memory.state_cache import StepStates


def mix_delta(rows: Tensor, gates: Tensor, mixer: DeltaNet, layer: int, states: StepStates) -> Tensor:
    """Implement `Kernels.mix_delta`."""
    assert rows.is_contiguous()
    assert gates.is_contiguous()
    sizes = mixer.sizes
    num_tokens, row_size = rows.shape
    channels = convolve(rows, mixer.kernel, mixer.kernel_bias, layer, states)
    factors = _prepare(channels, gates, mixer)
    out = _advance(channels, factors, mixer, layer, states)
    tokens_per_unit = max(1, FEW // sizes.width)
    _choose(kernels.norm_gate, num_tokens <= tokens_per_unit)(
        num_tokens,
        sizes.width,
        tokens_per_unit,
        sizes.head_dim,
        row_size,
        as_bits(mixer.eps),
        rows.data_ptr(),
        mixer.norm_weight.data_ptr(),
        out.data_ptr(),
    )
    return out


def _prepare(channels: Tensor, gates: Tensor, mixer: DeltaNet) -> Tensor:
    """Scale queries and keys in place. Return the factors of sums and of updates, [num_tokens, 2 *
    num_heads]."""
    sizes = mixer.sizes
    num_tokens = len(channels)
    factors = empty(num_tokens, 2 * sizes.num_heads)
    tokens_per_unit = max(1, FEW // sizes.group_width)
    _choose(kernels.prepare, num_tokens <= tokens_per_unit)(
        num_tokens,
        sizes.num_channels,
        sizes.num_groups,
        sizes.state_size,
        sizes.num_heads,
        gates.shape[1],
        mixer.first_head,
        tokens_per_unit,
        channels.data_ptr(),
        gates.data_ptr(),
        mixer.decay.data_ptr(),
        mixer.time_bias.data_ptr(),
        factors.data_ptr(),
    )
    return factors


def _advance(channels: Tensor, factors: Tensor, mixer: DeltaNet, layer: int, states: StepStates) -> Tensor:
    """Return the heads' outputs, [num_tokens, width], and update the sums."""
    sizes = mixer.sizes
    cache = states.cache
    num_tokens = len(channels)
    out = empty(num_tokens, sizes.width)
    _choose(kernels.advance, num_tokens * sizes.width * sizes.state_size < FEW)(
        num_tokens,
        len(states.slots),
        sizes.num_heads,
        sizes.head_dim,
        sizes.num_groups,
        sizes.state_size,
        states.slots.data_ptr(),
        states.begins.data_ptr(),
        cache.memory.stride(0),
        cache.sums(layer).data_ptr(),
        channels.data_ptr(),
        factors.data_ptr(),
        out.data_ptr(),
        *find_targets(states),
    )
    return out


def _choose(kernel: Kernel, is_small: bool) -> Callable[..., None]:
    return kernel if is_small else kernel.parallel
