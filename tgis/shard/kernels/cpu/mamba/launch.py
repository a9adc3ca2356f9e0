"""Launches the kernels of a Mamba 2 layer."""

from torch import Tensor

from tgis.shard.kernels.cpu.jit.compiler import as_bits, empty
from tgis.shard.kernels.cpu.mamba import kernels
from tgis.shard.kernels.cpu.states.launch import FEW, convolve, find_targets
from tgis.shard.layers.states import Mamba2
from tgis.shard.memory.state_cache import StepStates


def mix_states(rows: Tensor, mixer: Mamba2, layer: int, states: StepStates) -> Tensor:
    """Implement `Kernels.mix_states`."""
    assert rows.is_contiguous()
    sizes, cache = mixer.sizes, states.cache
    num_tokens, row_size = rows.shape
    num_seqs = len(states.slots)
    slot_size = cache.memory.stride(0)
    channels = convolve(rows, mixer.kernel, mixer.kernel_bias, layer, states)
    out = empty(num_tokens, sizes.width)
    step = (states.slots.data_ptr(), states.begins.data_ptr(), slot_size)

    is_small = num_tokens * sizes.width * sizes.state_size < FEW
    scan = kernels.scan if is_small else kernels.scan.parallel
    scan(
        num_tokens,
        num_seqs,
        sizes.num_heads,
        sizes.head_dim,
        sizes.num_groups,
        sizes.state_size,
        row_size,
        *step,
        cache.sums(layer).data_ptr(),
        channels.data_ptr(),
        rows.data_ptr(),
        mixer.decay.data_ptr(),
        mixer.time_bias.data_ptr(),
        mixer.skip.data_ptr(),
        as_bits(mixer.min_step),
        as_bits(mixer.max_step),
        out.data_ptr(),
        *find_targets(states),
    )
    return out
