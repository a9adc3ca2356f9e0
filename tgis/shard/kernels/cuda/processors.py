"""The number of multiprocessors, on which persistent kernels base their grids."""

from functools import lru_cache

import torch

# Of devices without kernels of their own: the interpreter's, and the one for which kernels are precompiled.
_OTHERS = {"cpu": 2, "meta": 132}


@lru_cache
def count_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _OTHERS[device.type]
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
