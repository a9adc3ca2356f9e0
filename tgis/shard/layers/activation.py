"""Activations of feed-forward layers, by their names in checkpoints."""

from collections.abc import Callable

from torch import Tensor

from tgis.shard.layers.ops import Kernels

# Maps a checkpoint's name to the kernel's name.
NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "quick_gelu": "quick_gelu",
}


def activation(name: str, kernels: Kernels) -> Callable[[Tensor], Tensor]:
    """Return a function that activates [num_tokens, size] in place."""
    kernel = NAMES[name]
    return lambda x: kernels.activate(x, kernel)


def gated_activation(name: str, kernels: Kernels) -> Callable[[Tensor], Tensor]:
    """Return a function gate_up, [num_tokens, 2 * size] -> activation(gate) * up, [num_tokens, size]."""
    kernel = NAMES[name]
    return lambda x: kernels.multiply_gated(x, kernel)
