"""Weights of layers that keep a state, as kernels receive them."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tgis.shard.memory.state_cache import StateSizes

# Place of the gate of Mamba 2's output.
#   before_norm:  norm(y * silu(gate))
#   after_norm:   norm(y) * silu(gate)
#   no_norm:      y * silu(gate)
Gating = Literal["before_norm", "after_norm", "no_norm"]


@dataclass(frozen=True)
class Mamba2:
    """This rank's part of a Mamba 2 layer, without its matrices. Tensors are float32.

    Its input is the product of the first matrix, rows of: gate [width]; channels of the convolution, which
    become x [num_heads, head_dim], B and C [num_groups, state_size]; time step [num_heads]. For every head:

        step = clamp(softplus(time step + time_bias)), between min_step and max_step
        sums = sums * exp(step * decay) + step * B x^T     [state_size, head_dim]
        y    = sums^T C + skip * x                          [head_dim]
    """

    sizes: StateSizes
    kernel: Tensor  # [kernel_size, num_channels], weights of the convolution, oldest input first
    kernel_bias: Tensor  # [num_channels]
    decay: Tensor  # [num_heads], negative
    time_bias: Tensor  # [num_heads]
    skip: Tensor  # [num_heads]
    norm_weight: Tensor  # [width], unused if there is no norm
    eps: float
    min_step: float = 0.0
    max_step: float = float("inf")
    gating: Gating = "before_norm"


@dataclass(frozen=True)
class DeltaNet:
    """This rank's part of a gated DeltaNet layer, without its matrices. Tensors are float32.

    Its input is the product of the first matrix, rows of: gate [width]; channels of the convolution, which
    become queries and keys [num_groups, state_size] and values [num_heads, head_dim]. Another matrix gives
    two numbers for every head of all ranks: strengths, then times. Queries and keys have the length 1, and
    queries are scaled by 1 / sqrt(state_size). For every head:

        sums = sums * exp(decay * softplus(time + time_bias))               [state_size, head_dim]
        sums = sums + sigmoid(strength) * key (value - sums^T key)^T
        y    = norm(sums^T query) * silu(gate)                              [head_dim]
    """

    sizes: StateSizes
    first_head: int  # number of this rank's first head
    total_heads: int  # heads of all ranks
    kernel: Tensor  # [kernel_size, num_channels], weights of the convolution, oldest input first
    kernel_bias: Tensor  # [num_channels]
    decay: Tensor  # [num_heads], negative
    time_bias: Tensor  # [num_heads]
    norm_weight: Tensor  # [head_dim]
    eps: float
