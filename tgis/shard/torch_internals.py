"""Private parts of torch. No other file may use them.

Checked with torch 2.13.0. In use:

- `ProcessGroupGloo._Options`: the public interfaces choose a network by the name of its interface, not by an
  address, and allow one default group per process.
- A backend's `_allgather_base`: the public interface to it needs the default group.
- `TorchDispatchMode` and an operator's `_schema`: torch's notes on extending it describe the mode, but its
  module is private.
- `_DisableTorchDispatch`: no public interface suspends a mode without a large cost for each operator.
- A module's hooks: no public interface returns them.
- The end of a memory pool's use: torch does not end it after a failed capture of a graph.

If a version changes them, ranks do not connect, steps are not captured, or failed captures keep memory.
tests/shard/test_torch_internals.py says what has changed."""

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_c10d: Any = dist  # the parts used here have no type stubs


def connect_gloo(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    """Return a process group whose rank listens at `address`. Raises RuntimeError."""
    gloo = _c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, size, options)


def gather_into(group: Any, out: Tensor, x: Tensor) -> Any:
    """Begin to write every rank's `x` to `out`, [size, *x.shape]. Return the work to wait for."""
    return group._allgather_base(out.view(-1), x.view(-1))  # gloo accepts no other shapes


class TorchOperatorError(Exception):
    """Error when a torch operator is used that is forbidden. Its text is the operator's name."""


class _RejectsOperators:
    """Handler of torch operators that rejects all except those that return views of their input."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        aliases = [given.alias_info for given in func._schema.returns]
        if not aliases or any(alias is None or alias.is_write for alias in aliases):
            raise TorchOperatorError(func)
        return func(*args, **(kwargs or {}))


class ForbidOperators(_RejectsOperators, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode in which operators are rejected.

    The handler is inherited: around one that a mode defines itself, torch imports its compiler at the first
    call, which takes seconds of a shard's start."""


def allow_operators() -> Any:
    """Return a context manager in which `ForbidOperators` does not see operators, which saves most of their
    cost under it."""
    return torch._C._DisableTorchDispatch()


def has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def end_pool_use(pool: Any) -> None:
    """End the use of a graph's memory pool on the current GPU. Without that, torch cannot release memory."""
    index = torch.cuda.current_device()
    with suppress(RuntimeError):  # fails if the use has ended already
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
