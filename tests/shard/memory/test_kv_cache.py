"""Check that the KV cache's memory is resident before a step needs it."""

import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import Tensor

from tgis.process.memory import background_advice
from tgis.process.memory.background_advice import MADV_POPULATE_WRITE
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


def test_memory_is_touched_in_short_calls_at_the_usual_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads that map memory wait for the end of a call, which a busy system hardly runs at a lower
    priority."""
    sizes: list[int] = []
    priorities: set[int] = set()

    def record(_address: ctypes.c_void_p, size: ctypes.c_size_t, advice: int) -> int:
        if advice == MADV_POPULATE_WRITE:
            sizes.append(size.value)
            priorities.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return 0

    monkeypatch.setattr(background_advice, "_madvise", record)
    before = set(threading.enumerate())
    cache = KVCache(
        num_layers=2, num_blocks=5_000, block_size=4, num_kv_heads=3, head_dim=40, dtype=torch.float32
    )
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert sum(sizes) >= cache.keys.nbytes + cache.values.nbytes
    assert max(sizes) <= (2 << 20) + mmap.PAGESIZE
    assert priorities == {os.getpriority(os.PRIO_PROCESS, 0)}


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
