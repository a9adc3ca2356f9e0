"""Device that no machine has. Its tensors are in the CPU's memory but must not be mixed with the CPU's own,
like a GPU's. Code that runs on it passes the device everywhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Name that every build of torch knows and that this service does not use.
DEVICE = torch.device("lazy", 0)
CPU = torch.device("cpu")
# Operators that copy tensors between devices, and those that do so with an index.
_MOVES = ("_to_copy", "to", "copy_")
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")


class MixedDevicesError(Exception):
    """Error when an operator gets tensors of both devices."""


class _Tensor(torch.Tensor):
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "_Tensor":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )

    def __init__(self, inner: Tensor):
        self.inner = inner

    def tolist(self) -> Any:
        return self.inner.tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        assert force, "a tensor of another device is no array"
        return self.inner.numpy(force=True)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _execute(function, args, kwargs or {})


class _Creates:
    """Handler of operators that creates requested tensors on the device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _execute(function, args, kwargs or {})


class _Mode(_Creates, TorchDispatchMode):
    """Dispatch mode of the handler, which is inherited so that torch does not import its compiler."""


@contextmanager
def present() -> Iterator[torch.device]:
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) uses the mode
    try:
        with _Mode():
            yield DEVICE
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def _execute(function: Any, args: Any, kwargs: Any) -> Any:
    given = tree_leaves((args, kwargs))
    here = {id(x.inner): x for x in given if isinstance(x, _Tensor)}
    devices = [x for x in given if isinstance(x, torch.device)]
    _check(function, args, kwargs, bool(here))
    result = function(*tree_map(_strip, args), **tree_map(_strip, kwargs))
    is_here = devices[0].type == DEVICE.type if devices else bool(here)
    if function.overloadpacket.__name__ == "copy_":
        is_here = isinstance(args[0], _Tensor)

    def dress(x: Any) -> Any:
        if not isinstance(x, Tensor) or not is_here:
            return x
        with torch.inference_mode(False):  # views must have the inference state of their base
            return here[id(x)] if id(x) in here else _Tensor(x)

    return tree_map(dress, result)


def _check(function: Any, args: Any, kwargs: Any, any_here: bool) -> None:
    name = function.overloadpacket.__name__
    if name in _INDEXED:
        args = (args[0], *args[2:])
    foreign = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not isinstance(x, _Tensor)]
    if any_here and name not in _MOVES and any(x.dim() for x in foreign):
        raise MixedDevicesError(f"{function} with tensors of two devices")


def _strip(x: Any) -> Any:
    if isinstance(x, torch.device):
        return CPU
    return x.inner if isinstance(x, _Tensor) else x
