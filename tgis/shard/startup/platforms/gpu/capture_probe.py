"""Finds out at the start whether the collectives of several ranks can be part of graphs.

NCCL's can, since version 2.9: all ranks must capture the same ones, and must replay graphs that they have
captured together. Connections must exist before a capture: the run of the work before it opens them."""

import zlib
from collections.abc import Collection

import torch
from torch import Tensor

from tgis.errors import first_line
from tgis.shard.collectives import MAX_GATHERED_BYTES, ProcessGroup
from tgis.shard.runner.device.stream import DeviceStream

# A sum that is gathered, and one that is computed in parts.
SIZES = (64, MAX_GATHERED_BYTES // 2)
NUM_REPLAYS = 3


class CollectivesProbe:
    """Collectives like those of a step, in fixed memory."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        sizes = [size * group.size for size in SIZES]
        self._inputs = [torch.zeros(size, device=device) for size in sizes]
        self._sums = [torch.zeros(size, device=device) for size in sizes]
        self._gathered = torch.zeros(group.size * SIZES[0] * group.size, device=device)

    @torch.inference_mode()
    def work(self) -> None:
        """Compute the collectives of the inputs."""
        for x, total in zip(self._inputs, self._sums, strict=True):
            self._group.all_reduce(total.copy_(x))
        self._gathered.copy_(self._group.all_gather(self._inputs[0]))

    @torch.inference_mode()
    def fill(self, number: int) -> None:
        """Set the inputs of a replay. The ranks' inputs differ."""
        for x in self._inputs:
            x.copy_(self._make_input(self._group.rank, number, len(x)))

    def is_right(self, number: int) -> bool:
        """Return True if the results are those of the inputs of a replay. This waits for the device."""
        ranks = range(self._group.size)
        for total in self._sums:
            expected = sum(self._make_input(rank, number, len(total)) for rank in ranks)
            if not torch.equal(total, torch.as_tensor(expected)):
                return False
        parts = [self._make_input(rank, number, len(self._inputs[0])) for rank in ranks]
        return torch.equal(self._gathered, torch.cat(parts))

    def _make_input(self, rank: int, number: int, size: int) -> Tensor:
        """Return small integers, whose sums are exact."""
        return (torch.arange(size, device=self._device) % 97 + (rank + 1) * 100 + number).float()


def find_rank_obstacle(
    stream: DeviceStream, group: ProcessGroup, replaced: Collection[str] = ()
) -> str | None:
    """Return why the ranks' collectives cannot be part of graphs; None if they can. `replaced` are the rank's
    replaced kernels, on which the sizes of graphs depend. All ranks call this at the same time and return a
    reason if any has one. Raises ProcessGroupError."""
    if group.backend is None or not group.backend.is_queued:
        return "the host waits for them"
    names = zlib.crc32(",".join(sorted(replaced)).encode())
    if group.min(names) != -group.min(-names):
        return "the ranks have replaced different kernels"
    reason = _try_capture(stream, group)
    if group.min(reason is None):
        return None
    return reason or "they failed on another rank"


def _try_capture(stream: DeviceStream, group: ProcessGroup) -> str | None:
    probe = CollectivesProbe(group, stream.device)
    try:
        graph = stream.capture(probe.work)
    except RuntimeError as error:
        return first_line(error)
    reason = None
    for number in range(NUM_REPLAYS):  # all ranks replay equally often, whatever they find
        stream.run(lambda number=number: probe.fill(number))  # type: ignore[misc]
        graph.replay()
        stream.record().wait()
        if not probe.is_right(number):
            reason = "replayed sums are wrong"
    return reason
