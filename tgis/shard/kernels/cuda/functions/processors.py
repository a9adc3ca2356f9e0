"""Properties of GPUs on which kernels base their grids and block sizes."""

from functools import lru_cache

import torch
from triton.runtime import driver

# Numbers for the interpreter's device and for the device of precompilation.
_OTHERS = {"cpu": 2, "meta": 132}


@lru_cache
def count_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _OTHERS[device.type]
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def find_capability(device: torch.device) -> int:
    """Return the compute capability for which kernels are compiled, such as 90 for 9.0. The interpreter has
    90."""
    return 90 if device.type == "cpu" else int(driver.active.get_current_target().arch)
