"""Process group of one model: this process's rank, its share of split dimensions, and the collectives.

Sums are added in the order of ranks, so all ranks get identical bits, which depend neither on the number of
rows nor on how the data travels."""

import builtins
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tgis.errors import OperatorError, first_line
from tgis.net.addresses import AddressError, parse
from tgis.shard.backend import Backend, TorchBackend
from tgis.shard.torch_internals import connect_gloo

CPU = torch.device("cpu")
LOOPBACK = "127.0.0.1"
# Larger sums of more than two ranks are computed in parts: each rank adds a part, and all gather the sums.
# This moves less data and needs less memory than gathering all summands, but takes two rounds.
MAX_GATHERED_BYTES = 1 << 18
_c10d: Any = dist  # the parts used here have no type stubs


class ProcessGroupError(OperatorError):
    """Error when the ranks do not connect, or one of them is lost."""


class LocalCollectives(Protocol):
    """Collectives of ranks on one machine, for some tensors. The others use the backend. All methods raise
    ProcessGroupError."""

    def can_reduce(self, x: Tensor) -> bool: ...

    def can_gather(self, x: Tensor) -> bool: ...

    def all_reduce(self, x: Tensor) -> None:
        """Sum `x` over all ranks, in place, in the order of ranks."""

    def all_gather(self, x: Tensor) -> Tensor: ...

    def leave(self) -> None: ...


OpenLocal = Callable[[Any, int, int, float], LocalCollectives | None]
"""Function of a store, rank, number of ranks and timeout in seconds, called on every rank. It returns None on
all ranks if they are not on one machine, and raises RuntimeError if a rank does not answer."""


@dataclass(frozen=True)
class ProcessGroup:
    rank: int
    size: int
    backend: Backend | None = field(default=None, repr=False, compare=False)
    device: torch.device = CPU
    num_on_host: int = 0  # ranks on this rank's machine; 0: all
    local: LocalCollectives | None = field(default=None, repr=False, compare=False)

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
        if self.local is not None and self.local.can_reduce(x):
            self.local.all_reduce(x)
        elif self.size == 2:  # the sum of two terms does not depend on their order
            self._complete(lambda backend: backend.all_reduce(x))
        elif self.size > 2:
            self._sum_in_order(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate every rank's [..., n] into [..., size * n]. Raises ProcessGroupError."""
        if self.local is not None and self.local.can_gather(x):
            return self.local.all_gather(x)
        return x if self.size == 1 else torch.cat(self._gather(x).unbind(), -1)

    def min(self, value: int) -> int:
        """Return the smallest of the ranks' values. Raises ProcessGroupError."""
        return int(self.all_gather(torch.tensor([value], device=self.device)).min())

    def leave(self) -> None:
        if self.local is not None:
            self.local.leave()
        if self.backend is not None:
            self.backend.leave()

    def _sum_in_order(self, x: Tensor) -> None:
        is_divisible = x.is_contiguous() and x.numel() % self.size == 0
        if x.nbytes <= MAX_GATHERED_BYTES or not is_divisible:
            add_in_order(self._gather(x), x)
            return
        parts = x.view(self.size, -1)
        received = torch.empty_like(parts)
        self._complete(lambda backend: backend.exchange(received, parts))
        total = torch.empty_like(parts[0])
        add_in_order(received, total)
        self._complete(lambda backend: backend.all_gather(parts, total))

    def _gather(self, x: Tensor) -> Tensor:
        """Return every rank's `x`, [size, *x.shape]."""
        x = x.contiguous()
        out = x.new_empty((self.size, *x.shape))
        self._complete(lambda backend: backend.all_gather(out, x))
        return out

    def _complete(self, run: Callable[[Backend], None]) -> None:
        assert self.backend is not None, "a group of several ranks has a backend"
        try:
            run(self.backend)
        except RuntimeError as error:
            text = f"a rank was lost or does not respond: {first_line(error)}"
            raise ProcessGroupError(text) from error


def add_in_order(parts: Tensor, out: Tensor) -> None:
    """Write the sum of `parts`, [size, *out.shape], to `out`. They are added in float32, one after the other,
    and rounded once."""
    first, *others = parts.unbind()
    total = out.copy_(first) if out.dtype == torch.float32 else first.float()
    for other in others:
        total.add_(other)
    if total is not out:
        out.copy_(total)


@dataclass(frozen=True)
class RendezvousPoint:
    """Rendezvous of the ranks for one start of the group. Each start needs a new one."""

    place: str  # a file, or HOST:PORT
    address: str = LOOPBACK  # where the other ranks connect to this one
    listener: int | None = None  # file descriptor of rank 0's open socket, if `place` is HOST:PORT


def connect(
    rank: int,
    size: int,
    rendezvous: RendezvousPoint,
    timeout_s: float,
    device: torch.device = CPU,
    open_local: OpenLocal | None = None,
) -> ProcessGroup:
    """Connect to the other ranks. `timeout_s` limits each wait for another rank, here and in collectives.
    Raises ProcessGroupError."""
    if size == 1:
        return ProcessGroup(rank, size, device=device)
    timeout = timedelta(seconds=timeout_s)
    connect_backend = _connect_nccl if device.type == "cuda" else connect_gloo
    try:
        store = _open_store(rank, size, rendezvous, timeout)
        torch_group = connect_backend(store, rank, size, timeout, rendezvous.address)
        local = None if open_local is None else open_local(store, rank, size, timeout_s)
    except RuntimeError as error:
        text = (
            f"rank {rank} could not connect to all {size} ranks within {timeout_s:g} s: {first_line(error)}"
        )
        raise ProcessGroupError(text) from error
    backend = TorchBackend(torch_group, is_queued=device.type == "cuda")
    return ProcessGroup(rank, size, backend, device, local=local)


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
