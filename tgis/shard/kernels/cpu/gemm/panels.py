"""How weights lie in memory for products that stream them: panels of a few columns of W^T, one after the
other, in memory that the system may map in huge pages."""

import logging
import mmap
import threading

import torch
from numba.core.registry import cpu_target
from torch import Tensor

logger = logging.getLogger(__name__)

_HUGE, _CHUNK, _LINE = 1 << 21, 1 << 26, 64  # bytes: of a huge page, taken from the system at once, of a line


def has_feature(name: str) -> bool:
    """Whether kernels are compiled for a processor with that feature, in LLVM's words."""
    features: str = cpu_target.target_context.codegen().magic_tuple()[2]
    return f"+{name}" in features.split(",")


LANES = 16 if has_feature("avx512f") else 8  # float32 of a vector
PANEL = 2 * LANES  # outputs whose weights lie together: panels are [in_features, PANEL]


def count_panels(out_features: int) -> int:
    """The last one is filled up with zeros."""
    return -(-out_features // PANEL)


class Arena:
    """Memory for weights; it goes back to the system when all that lies in the same chunk is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], zero, at the start of a cache line; from any thread."""
        with self._lock:
            if self._used + num_bytes > len(self._chunk):
                self._chunk, self._used = _map(max(num_bytes, _CHUNK)), 0
            part = self._chunk[self._used : self._used + num_bytes]
            self._used += -(-num_bytes // _LINE) * _LINE
            return part


def _map(num_bytes: int) -> Tensor:
    """Fresh memory that begins with a huge page; what is not touched costs nothing."""
    # Shared memory, the default, gets no huge pages.
    memory = mmap.mmap(-1, num_bytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError) as error:
        logger.info("no huge pages for weights: %s", error)
    return whole[start : start + num_bytes]


arena = Arena()
