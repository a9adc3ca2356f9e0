"""Collectives in memory that all ranks of a machine share, between compiled kernels without the GIL."""

import platform
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tgis.shard.collectives import ProcessGroupError
from tgis.shard.kernels.cpu.jit.compiler import empty
from tgis.shard.kernels.cpu.jit.waiting import library_address
from tgis.shard.kernels.cpu.shared_memory import kernels
from tgis.shard.kernels.cpu.shared_memory.kernels import DONE, HEADER_BYTES, LATE, LOST
from tgis.shard.kernels.cpu.shared_memory.region import SharedRegion, open_region

SLOT_BYTES = 1 << 20
FUTEX = {"x86_64": 202, "aarch64": 98}  # numbers of the system call, by architecture


def open_collectives(store: Any, rank: int, size: int, timeout_s: float) -> "SharedMemoryCollectives | None":
    """Return collectives of all ranks, or None on all ranks if they share no memory. Raises RuntimeError if a
    rank does not answer."""
    region = open_region(store, rank, size, HEADER_BYTES + 2 * SLOT_BYTES, platform.machine() in FUTEX)
    return None if region is None else SharedMemoryCollectives(region, rank, size, timeout_s)


class SharedMemoryCollectives:
    """`LocalCollectives` of ranks that share memory. One thread at a time may use them."""

    def __init__(self, region: SharedRegion, rank: int, size: int, timeout_s: float) -> None:
        self._region = region
        self._size, self._timeout_s = size, timeout_s
        self._state = np.zeros(kernels.STATE_FDS + size - 1, np.int64)
        for index, pipe in enumerate(region.pipes):
            [self._state[kernels.STATE_FDS + index]] = struct.unpack("q", struct.pack("ihh", pipe, 0, 0))
        self._link = (
            *(region.address, SLOT_BYTES, rank, size, self._state.ctypes.data, int(timeout_s * 1e9)),
            *(FUTEX[platform.machine()], *map(library_address, ("syscall", "ppoll", "clock_gettime"))),
        )

    def can_reduce(self, x: Tensor) -> bool:
        return x.dtype == torch.float32 and x.is_contiguous()

    def can_gather(self, x: Tensor) -> bool:
        return 0 < x.shape[-1] * x.itemsize <= SLOT_BYTES

    def all_reduce(self, x: Tensor) -> None:
        kernels.all_reduce(*self._link, x.data_ptr(), x.numel(), check=self._check)

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        shape = (*x.shape[:-1], self._size * x.shape[-1])
        # Only float32 memory can be part of a kernel graph.
        out = empty(*shape) if x.dtype == torch.float32 else torch.empty(shape, dtype=x.dtype)
        row_bytes = x.shape[-1] * x.itemsize
        num_rows = x.numel() // x.shape[-1]
        addresses = (x.data_ptr(), out.data_ptr())
        kernels.all_gather(*self._link, *addresses, num_rows, row_bytes, check=self._check)
        return out

    def leave(self) -> None:
        if self._state[kernels.STATE_OUTCOME] == DONE:
            self._state[kernels.STATE_OUTCOME] = LOST
        self._region.close()

    def _check(self) -> None:
        outcome = self._state[kernels.STATE_OUTCOME]
        if outcome == DONE:
            return
        rank = self._state[kernels.STATE_RANK]
        reasons = {LOST: "a rank has ended", LATE: f"rank {rank} did not come within {self._timeout_s:g} s"}
        raise ProcessGroupError(
            f"a rank was lost or does not respond: {reasons.get(outcome, f'rank {rank} has another tensor')}"
        )
