"""Collectives that a process group is built on: torch's, over gloo or NCCL."""

from typing import Any, Protocol

from torch import Tensor

from tgis.shard.torch_internals import gather_into


class Backend(Protocol):
    """Collectives of all ranks, called in the same order on each. All methods raise RuntimeError if a rank is
    lost or does not respond."""

    @property
    def is_queued(self) -> bool:
        """True if collectives are queued on the device's current stream like kernels, so that graphs may
        contain them. Otherwise the host waits for them."""

    def all_reduce(self, x: Tensor) -> None:
        """Sum `x` over all ranks, in place and in any order."""

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Write every rank's `x` to `out`, [size, *x.shape]. Both are contiguous."""

    def exchange(self, out: Tensor, x: Tensor) -> None:
        """Send x[r] to rank r, and write what rank r sends to out[r]; both are contiguous, [size, n]."""

    def leave(self) -> None: ...


class TorchBackend:
    """`Backend` of one of torch's process groups."""

    def __init__(self, group: Any, is_queued: bool) -> None:
        self.is_queued = is_queued
        self._group = group

    def all_reduce(self, x: Tensor) -> None:
        self._group.allreduce([x]).wait()

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        gather_into(self._group, out, x).wait()

    def exchange(self, out: Tensor, x: Tensor) -> None:
        self._group.alltoall_base(out, x, [], []).wait()

    def leave(self) -> None:
        self._group.shutdown()
