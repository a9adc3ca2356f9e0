"""Collectives that are queued and captured like NCCL's, computed by gloo. They are torch operators, so an
emulated graph records them and replays them."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tgis.shard.collectives import ProcessGroup
from tgis.shard.torch_internals import connect_gloo

GLOO: Any = dist.ProcessGroupGloo
# Taken here, because graphs refuse gloo's own functions while they record.
ALL_REDUCE, ALL_GATHER, EXCHANGE = GLOO.allreduce, GLOO._allgather_base, GLOO.alltoall_base
GROUPS: list[Any] = []
LIBRARY = torch.library.Library("queued_gloo", "DEF")
LIBRARY.define("all_reduce(Tensor(a!) x, int group) -> ()")
LIBRARY.define("all_gather(Tensor(a!) out, Tensor x, int group) -> ()")
LIBRARY.define("exchange(Tensor(a!) out, Tensor x, int group) -> ()")


def all_reduce(x: Tensor, group: int) -> None:
    ALL_REDUCE(GROUPS[group], [x]).wait()


def all_gather(out: Tensor, x: Tensor, group: int) -> None:
    ALL_GATHER(GROUPS[group], out.view(-1), x.view(-1)).wait()


def exchange(out: Tensor, x: Tensor, group: int) -> None:
    EXCHANGE(GROUPS[group], out, x, [], []).wait()


for function in (all_reduce, all_gather, exchange):
    LIBRARY.impl(function.__name__, function, "CompositeExplicitAutograd")


class QueuedGloo:
    """`Backend` that emulates NCCL's."""

    is_queued = True

    def __init__(self, group: Any) -> None:
        self._number = len(GROUPS)
        GROUPS.append(group)

    def all_reduce(self, x: Tensor) -> None:
        torch.ops.queued_gloo.all_reduce(x, self._number)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        torch.ops.queued_gloo.all_gather(out, x, self._number)

    def exchange(self, out: Tensor, x: Tensor) -> None:
        torch.ops.queued_gloo.exchange(out, x, self._number)

    def leave(self) -> None:
        """Do nothing. The group ends with its process."""


def connect_queued(rank: int, size: int, place: Path, timeout_s: float = 30.0) -> ProcessGroup:
    """Connect the ranks that meet in the file `place`."""
    store = dist.FileStore(str(place), size)  # type: ignore[attr-defined]
    group = connect_gloo(store, rank, size, timedelta(seconds=timeout_s), "127.0.0.1")
    return ProcessGroup(rank, size, QueuedGloo(group))
