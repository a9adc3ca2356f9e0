"""The ranks of one model: which this one is, what part of anything is its own, and the few collectives.

Sums are taken in an order that only the number of ranks decides, so all ranks hold the same bits."""

import builtins
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tgis.errors import OperatorError
from tgis.net.addresses import AddressError, parse

CPU = torch.device("cpu")
LOOPBACK = "127.0.0.1"
_c10d: Any = dist  # what is needed of it has no stubs


class WorldError(OperatorError):
    """The ranks did not meet, or one of them was lost; the text is one line."""


@dataclass(frozen=True)
class World:
    """`device` is where this rank's tensors are, those of collectives among them."""

    rank: int
    size: int
    group: Any = field(default=None, repr=False, compare=False)
    device: torch.device = CPU
    num_on_host: int = 0
    """Ranks that share this one's machine; 0: all of them do."""

    @property
    def local_size(self) -> int:
        return self.num_on_host or self.size

    def slice(self, length: int, pieces: int | None = None) -> builtins.slice:
        """This rank's share of `length` things; cut in fewer `pieces` than ranks, neighbours share one."""
        pieces = pieces or self.size
        assert length % pieces == 0, f"{length} cannot be cut into {pieces}"
        piece, width = self.rank * pieces // self.size, length // pieces
        return builtins.slice(piece * width, (piece + 1) * width)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place. Raises WorldError."""
        if self.size == 2:  # a sum of two has one order only
            _complete(lambda: self.group.allreduce([x]))
        elif self.size > 2:
            torch.sum(torch.stack(self._gather(x)), 0, out=x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., n] of every rank -> [..., size * n]. Raises WorldError."""
        return x if self.size == 1 else torch.cat(self._gather(x), -1)

    def min(self, value: int) -> int:
        """The least of the ranks' values. Raises WorldError."""
        if self.size == 1:
            return value
        return int(torch.cat(self._gather(torch.tensor([value], device=self.device))).min())

    def leave(self) -> None:
        """Closes the connections to the other ranks; nothing collective works afterwards."""
        if self.group is not None:
            self.group.shutdown()

    def _gather(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        _complete(lambda: self.group.allgather([parts], [x]))
        return parts


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one start of the group find each other: a file, or HOST:PORT, where rank 0 listens
    with the socket that is open as `listener`. Either must be new for every start.

    The others connect to this rank at `address`, and nowhere else."""

    place: str
    address: str = LOOPBACK
    listener: int | None = None


def join(rank: int, size: int, meeting: Meeting, timeout_s: float, device: torch.device = CPU) -> World:
    """Meets the other ranks. No rank waits longer than the time limit for another, here or in a collective.
    Raises WorldError."""
    if size == 1:
        return World(rank, size, device=device)
    timeout = timedelta(seconds=timeout_s)
    meet = _meet_nccl if device.type == "cuda" else _meet_gloo
    try:
        store = _open_store(rank, size, meeting, timeout)
        return World(rank, size, meet(store, rank, size, timeout, meeting.address), device)
    except RuntimeError as error:
        text = f"rank {rank} did not meet all {size} ranks within {timeout_s:g} s: {_first_line(error)}"
        raise WorldError(text) from error


def _open_store(rank: int, size: int, meeting: Meeting, timeout: timedelta) -> Any:
    """By which addresses are exchanged. Raises WorldError, and RuntimeError."""
    if "/" in meeting.place:
        store = _c10d.FileStore(meeting.place, size)
        store.set_timeout(timeout)
        return store
    try:
        address = parse(meeting.place)
    except AddressError as error:
        raise WorldError(f"the ranks cannot meet there: {error}") from error
    return _c10d.TCPStore(
        address.host,
        address.port,
        size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=meeting.listener if rank == 0 else None,
    )


def _meet_gloo(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    gloo = _c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout, options._devices = timeout, [gloo.create_device(hostname=address)]
    return gloo(store, rank, size, options)


def _meet_nccl(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    """Ranks meet in their first collective, which is done here so that what hinders them shows now.

    It knows interfaces, not addresses: NCCL_SOCKET_IFNAME names one, which the launcher sets where all ranks
    are on one machine."""
    nccl = _c10d.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    group = nccl(store, rank, size, options)
    group.allreduce([torch.zeros(1, device="cuda")]).wait()
    torch.cuda.synchronize()
    return group


def _complete(begin: Callable[[], Any]) -> None:
    try:
        begin().wait()
    except RuntimeError as error:
        raise WorldError(f"a rank of the group was lost or hangs: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
