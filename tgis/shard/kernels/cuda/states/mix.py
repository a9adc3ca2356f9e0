"""Recurrent layers of GPUs: convolution, scan, and the storage of inputs for later tokens."""

from collections.abc import Callable
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from tgis.shard.kernels.cuda.states.chunks import Spans, StateMemory
from tgis.shard.kernels.cuda.states.keep_inputs import HeadInputs
from tgis.shard.layers.states import DeltaNet, Mamba2
from tgis.shard.memory.state_cache import StepStates


class StateKernels(Protocol):
    """The part of `Implementations` that recurrent layers use."""

    @property
    def convolve(self) -> Callable[..., Tensor]: ...
    @property
    def scan_mamba(self) -> Callable[..., Tensor]: ...
    @property
    def scan_delta(self) -> Callable[..., Tensor]: ...
    @property
    def keep_inputs(self) -> Callable[..., None]: ...


def mix_states(kernels: StateKernels, rows: Tensor, mixer: Mamba2, layer: int, states: StepStates) -> Tensor:
    """Implement `Kernels.mix_states`."""
    sizes = mixer.sizes
    memory = StateMemory.of(states, layer)
    spans = Spans.of(states)
    channels = kernels.convolve(rows, sizes.width, mixer.kernel, mixer.kernel_bias, memory.windows, spans)
    y = kernels.scan_mamba(rows, channels, mixer, memory, spans)
    heads = HeadInputs(rows, (rows.shape[1] - sizes.num_heads,), sizes.num_heads)
    kernels.keep_inputs(rows, sizes.width, channels, heads, memory, spans)
    return y


def mix_delta(
    kernels: StateKernels, rows: Tensor, gates: Tensor, mixer: DeltaNet, layer: int, states: StepStates
) -> Tensor:
    """Implement `Kernels.mix_delta`."""
    sizes = mixer.sizes
    memory = StateMemory.of(states, layer)
    spans = Spans.of(states)
    channels = kernels.convolve(rows, sizes.width, mixer.kernel, mixer.kernel_bias, memory.windows, spans)
    y = kernels.scan_delta(gates, channels, mixer, memory, spans)
    columns = mixer.total_heads + mixer.first_head, mixer.first_head
    heads = HeadInputs(gates, columns, sizes.num_heads)
    kernels.keep_inputs(rows, sizes.width, channels, heads, memory, spans)
    y = y.view(len(y), sizes.num_heads, sizes.head_dim)
    y = F.rms_norm(y, y.shape[2:], mixer.norm_weight, mixer.eps).flatten(1)
    return y.mul_(F.silu(rows[:, : sizes.width].float()))
