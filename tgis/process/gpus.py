"""Which GPUs a process may use, as far as that can be told without loading a library that could use them."""

import re
from pathlib import Path

_GPU = re.compile(r"nvidia\d+")


def has_gpus(cuda_visible_devices: str | None, root: Path = Path("/dev")) -> bool:
    """Whether the machine has NVIDIA devices, and CUDA_VISIBLE_DEVICES, None where it is not set, does not
    hide them by naming none, or first one that there cannot be."""
    is_hidden = cuda_visible_devices is not None and cuda_visible_devices.strip() in ("", "-1", "NoDevFiles")
    return not is_hidden and any(_GPU.fullmatch(path.name) for path in root.glob("nvidia*"))
