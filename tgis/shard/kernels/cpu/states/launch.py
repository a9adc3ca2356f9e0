"""Launches the convolution of recurrent layers."""

from torch import Tensor

from tgis.shard.kernels.cpu.jit.compiler import empty
from tgis.shard.kernels.cpu.states import convolution
from tgis.shard.memory.state_cache import StepStates

FEW = 1 << 14  # multiplications, below which several threads cost more than they save


def convolve(rows: Tensor, kernel: Tensor, bias: Tensor, layer: int, states: StepStates) -> Tensor:
    """Return silu of the causal convolution of the channels that follow the gate in rows, [num_tokens,
    num_channels], and update the windows."""
    sizes = states.cache.shape.sizes
    cache = states.cache
    num_tokens, row_size = rows.shape
    channels = empty(num_tokens, sizes.num_channels)
    is_small = num_tokens * sizes.num_channels * sizes.kernel_size < FEW
    run = convolution.convolve if is_small else convolution.convolve.parallel
    run(
        num_tokens,
        len(states.slots),
        sizes.num_channels,
        sizes.kernel_size,
        row_size,
        sizes.width,
        states.slots.data_ptr(),
        states.begins.data_ptr(),
        cache.memory.stride(0),
        cache.windows(layer).data_ptr(),
        rows.data_ptr(),
        kernel.data_ptr(),
        bias.data_ptr(),
        channels.data_ptr(),
        *find_targets(states),
    )
    return channels


def find_targets(states: StepStates) -> tuple[int, int]:
    """Return the address and the number of the slots that get the states after tokens."""
    return (0, 0) if states.targets is None else (states.targets.data_ptr(), len(states.targets))
