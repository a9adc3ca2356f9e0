"""Process group of one model: this process's rank, its share of split dimensions, and the collectives.

The order of a sum depends only on the number of ranks, so all ranks get identical bits."""

import builtins
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tgis.errors import OperatorError, first_line
from tgis.net.addresses import AddressError, parse
from tgis.shard.torch_internals import connect_gloo

CPU = torch.device("cpu")
LOOPBACK = "127.0.0.1"
_c10d: Any = dist  # the parts used here have no type stubs


class ProcessGroupError(OperatorError):
    """Error when the ranks do not connect, or one of them is lost."""


@dataclass(frozen=True)
class ProcessGroup:
    rank: int
    size: int
    backend: Any = field(default=None, repr=False, compare=False)
    device: torch.device = CPU
    num_on_host: int = 0  # ranks on this rank's machine; 0: all

    @property
    def local_size(self) -> int:
        return self.num_on_host or self.size

    def slice(self, length: int, pieces: int | None = None) -> builtins.slice:
        """Return this rank's share of a dimension of `length`. If there are fewer `pieces` than ranks,
        adjacent ranks share a piece."""
        pieces = pieces or self.size
        assert length % pieces == 0, f"{length} cannot be cut into {pieces}"
        piece = self.rank * pieces // self.size
        width = length // pieces
        return builtins.slice(piece * width, (piece + 1) * width)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over all ranks, in place. Raises ProcessGroupError."""
        if self.size == 2:  # the sum of two terms does not depend on their order
            _complete(lambda: self.backend.allreduce([x]))
        elif self.size > 2:
            torch.sum(torch.stack(self._gather(x)), 0, out=x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate every rank's [..., n] into [..., size * n]. Raises ProcessGroupError."""
        return x if self.size == 1 else torch.cat(self._gather(x), -1)

    def min(self, value: int) -> int:
        """Return the smallest of the ranks' values. Raises ProcessGroupError."""
        if self.size == 1:
            return value
        return int(torch.cat(self._gather(torch.tensor([value], device=self.device))).min())

    def leave(self) -> None:
        if self.backend is not None:
            self.backend.shutdown()

    def _gather(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        _complete(lambda: self.backend.allgather([parts], [x]))
        return parts


@dataclass(frozen=True)
class RendezvousPoint:
    """Rendezvous of the ranks for one start of the group. Each start needs a new one."""

    place: str  # a file, or HOST:PORT
    address: str = LOOPBACK  # where the other ranks connect to this one
    listener: int | None = None  # file descriptor of rank 0's open socket, if `place` is HOST:PORT


def connect(
    rank: int, size: int, rendezvous: RendezvousPoint, timeout_s: float, device: torch.device = CPU
) -> ProcessGroup:
    """Connect to the other ranks. `timeout_s` limits each wait for another rank, here and in collectives.
    Raises ProcessGroupError."""
    if size == 1:
        return ProcessGroup(rank, size, device=device)
    timeout = timedelta(seconds=timeout_s)
    connect_backend = _connect_nccl if device.type == "cuda" else connect_gloo
    try:
        store = _open_store(rank, size, rendezvous, timeout)
        return ProcessGroup(
            rank, size, connect_backend(store, rank, size, timeout, rendezvous.address), device
        )
    except RuntimeError as error:
        text = (
            f"rank {rank} could not connect to all {size} ranks within {timeout_s:g} s: {first_line(error)}"
        )
        raise ProcessGroupError(text) from error


def _open_store(rank: int, size: int, rendezvous: RendezvousPoint, timeout: timedelta) -> Any:
    if "/" in rendezvous.place:
        store = _c10d.FileStore(rendezvous.place, size)
        store.set_timeout(timeout)
        return store
    try:
        address = parse(rendezvous.place)
    except AddressError as error:
        raise ProcessGroupError(f"invalid rendezvous address: {error}") from error
    return _c10d.TCPStore(
        address.host,
        address.port,
        size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=rendezvous.listener if rank == 0 else None,
    )


def _connect_nccl(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    # `address` is unused: NCCL is configured by network interface, with NCCL_SOCKET_IFNAME. The launcher sets
    # it if all ranks are on one machine.
    backend = _c10d.ProcessGroupNCCL(store, rank, size, timeout)
    # NCCL connects the ranks in the first collective. Running one here reports connection errors now.
    backend.allreduce([torch.zeros(1, device="cuda")]).wait()
    torch.cuda.synchronize()
    return backend


def _complete(begin: Callable[[], Any]) -> None:
    try:
        begin().wait()
    except RuntimeError as error:
        raise ProcessGroupError(f"a rank was lost or does not respond: {first_line(error)}") from error
