"""Check that the KV cache's memory is resident before a step needs it."""

import ctypes
import mmap
import subprocess
import sys
import time

import pytest
import torch
from torch import Tensor

from tgis.shard.memory.kv_cache import KVCache


def resident_share(memory: Tensor) -> float:
    """Return the resident share of the memory's whole pages, as the system counts them."""
    begin = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_pages = (memory.data_ptr() + memory.nbytes - begin) // mmap.PAGESIZE
    flags = (ctypes.c_ubyte * num_pages)()
    size = ctypes.c_size_t(num_pages * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), size, flags) == 0
    return sum(flag & 1 for flag in flags) / num_pages


def test_memory_is_touched_without_being_waited_for() -> None:
    """Check that memory is touched in the background, also for layers that do not start at a page
    boundary."""
    cache = KVCache(
        num_layers=3, num_blocks=1001, block_size=4, num_kv_heads=3, head_dim=40, dtype=torch.float16
    )
    deadline = time.monotonic() + 20
    while min(resident_share(memory) for memory in (cache.keys, cache.values)) < 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not cache.keys.any()
    assert not cache.values.any()


_ENDS_EARLY = """
import sys, torch
from tgis.shard.memory.kv_cache import KVCache
cache = KVCache(30, 2_000, 16, 8, 64, torch.float32)
sys.exit(3)
"""


@pytest.mark.slow
def test_a_process_may_end_while_its_memory_is_touched() -> None:
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", _ENDS_EARLY]).returncode == 3
