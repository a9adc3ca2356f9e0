"""Activations of feed-forward layers, by their names in checkpoints."""

CLAMPED_SWIGLU = "clamped_swiglu"
"""Gated activation of gpt-oss, which no checkpoint names: gate * sigmoid(1.702 gate) * (up + 1), with the
gate at most 7 and `up` within -7 and 7."""

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
    "relu2": "relu2",
    "quick_gelu": "quick_gelu",
}


def find_kernel(name: str) -> str:
    """Return the kernel's name of an activation."""
    return name if name == CLAMPED_SWIGLU else NAMES[name]
