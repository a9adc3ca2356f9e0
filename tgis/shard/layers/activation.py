"""Activations of feed-forward layers, by the names that checkpoints give them."""

from collections.abc import Callable

from torch import Tensor

from tgis.shard.layers.ops import Kernels

# A checkpoint's name -> the kernel's.
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


def activated(name: str, kernels: Kernels) -> Callable[[Tensor], Tensor]:
    """[num_tokens, size] -> its activation, in place."""
    kernel = NAMES[name]
    return lambda x: kernels.activate(x, kernel)


def gated(name: str, kernels: Kernels) -> Callable[[Tensor], Tensor]:
    """[num_tokens, 2 * size], gates before values -> activation(gate) * value, [num_tokens, size]."""
    kernel = NAMES[name]
    return lambda x: kernels.multiply_gated(x, kernel)
