"""Memory in huge pages, because kernels read weights and activations in strides that need many pages of 4
KiB."""

import logging
import mmap
import threading

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_HUGE = 1 << 21  # bytes of a huge page
_CHUNK = 1 << 26  # bytes of an allocation
_LINE = 64  # bytes of a cache line


class Arena:
    """Allocator of memory for which huge pages are requested. A chunk is returned to the system when all
    memory in it is freed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def allocate(self, num_bytes: int) -> Tensor:
        """Return zeroed uint8 [num_bytes] that begins at a cache line. Thread-safe."""
        with self._lock:
            if self._used + num_bytes > len(self._chunk):
                self._chunk = _map(max(num_bytes, _CHUNK))
                self._used = 0
            part = self._chunk[self._used : self._used + num_bytes]
            self._used += -(-num_bytes // _LINE) * _LINE
            return part


def _map(num_bytes: int) -> Tensor:
    """Map memory that begins at a huge page. Untouched pages use no memory."""
    # Private, because shared memory, the default, gets no huge pages.
    memory = mmap.mmap(-1, num_bytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError) as error:
        logger.info("huge pages are not available: %s", error)
    return whole[start : start + num_bytes]
