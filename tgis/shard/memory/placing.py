"""Copies of a host's arrays on a device."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def place(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Return a copy of an array on a device, or the array itself as a tensor of the host. The host does not
    wait for the copy, which a GPU queues after earlier work."""
    return move(torch.from_numpy(array), device)


def move(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device, like `place`."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
