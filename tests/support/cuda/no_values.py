"""Detects operators that a CUDA graph cannot capture, because they read values or host memory."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose result sizes, or the host, depend on values.
_NAMES = {
    "_local_scalar_dense",
    "bincount",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "unique_dim",
    "_unique2",
}


class ValueReadError(Exception):
    """Error when an operator waits for the device. Its text is the operator's name."""


class _RejectsReads:
    """Handler of operators that rejects those that wait for values of the device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if name in _NAMES or (name.startswith("index") and _has_mask(args[1])):
            raise ValueReadError(name)
        return function(*args, **(kwargs or {}))


class NoValues(_RejectsReads, TorchDispatchMode):
    """Dispatch mode of the handler, which is inherited so that torch does not import its compiler."""


def _has_mask(indices: Any) -> bool:
    given = indices if isinstance(indices, list | tuple) else []
    return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in given)
