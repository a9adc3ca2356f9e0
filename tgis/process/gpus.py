"""Detects usable GPUs without loading a GPU library."""

import re
from pathlib import Path

_GPU = re.compile(r"nvidia\d+")


def has_gpus(cuda_visible_devices: str | None, root: Path = Path("/dev")) -> bool:
    """Return True if there are NVIDIA devices that CUDA_VISIBLE_DEVICES (None: not set) does not hide.

    The variable hides all devices if it is empty, or if its first device cannot exist."""
    is_hidden = cuda_visible_devices is not None and cuda_visible_devices.strip() in ("", "-1", "NoDevFiles")
    return not is_hidden and count_gpus(root) > 0


def count_gpus(root: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA devices of the machine or container."""
    return sum(1 for path in root.glob("nvidia*") if _GPU.fullmatch(path.name))
