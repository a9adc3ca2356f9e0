"""Kernel graphs: all threads run the kernels in order, repeatedly, on the same memory."""

from collections.abc import Iterator
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray
from torch import Tensor

from bench.stopwatch import time_launches
from tgis.shard.kernels.cpu.jit.compiler import Kernel, capture, next_unit, pointer
from tgis.shard.kernels.cpu.kernel_graph import KernelGraph, MemoryPool

_I64 = np.int64(0)
LENGTH, STEPS = 1000, 200


def _shift(args: Any) -> None:
    """Each unit reads results of the preceding kernel, most of them written by other threads."""
    a = carray(args, 5)
    x, out = carray(pointer(a[2], _I64), (a[1],)), carray(pointer(a[3], _I64), (a[1],))
    unit = next_unit(args)
    while unit < a[1]:
        out[unit] = 3 * x[(unit * 7 + a[4]) % a[1]] + 1
        unit = next_unit(args)


shift = Kernel(_shift)


@pytest.fixture(params=[1, 2, 5, 16])  # more than cores: threads that come late find no work
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def shift_often(x: Tensor, y: Tensor) -> None:
    for step in range(STEPS):
        run = shift if step % 3 == 0 else shift.parallel
        run(len(x), x.data_ptr(), y.data_ptr(), step)
        x, y = y, x


def expected(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    units = np.arange(len(x))
    for step in range(STEPS):
        x = 3 * x[(units * 7 + step) % len(x)] + 1
    return x


def graph_of(x: Tensor, y: Tensor) -> KernelGraph:
    with capture(MemoryPool().empty) as launches:
        shift_often(x, y)
    return KernelGraph(launches)


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_graph_computes_the_same_as_the_calls(threads: int) -> None:
    x, y = torch.arange(LENGTH), torch.zeros(LENGTH, dtype=torch.int64)
    graph = graph_of(x, y)
    assert x.equal(torch.arange(LENGTH)), "capturing computes nothing"
    for start in range(3):
        x.copy_(torch.arange(LENGTH) + start)
        graph.replay()
        assert (x.numpy() == expected(np.arange(LENGTH) + start)).all()


def test_only_the_thread_that_captures_is_captured() -> None:
    x, y = torch.arange(LENGTH), torch.zeros(LENGTH, dtype=torch.int64)
    with capture(MemoryPool().empty) as launches:
        beside = Thread(target=lambda: shift(LENGTH, x.data_ptr(), y.data_ptr(), 0))
        beside.start()
        beside.join()
    KernelGraph(launches).replay()
    assert y[:2].tolist() == [1, 22]


def test_buffers_are_reused_after_their_last_view() -> None:
    pool = MemoryPool()
    first = pool.empty((3, 100))
    view = first[1:].flatten()
    address = first.data_ptr()
    del first
    other = pool.empty((3, 100))
    assert other.data_ptr() != address, "a view still exists"
    del view
    assert pool.empty((290,)).data_ptr() == address
    assert pool.num_bytes == 2 * 2048
    assert other.data_ptr() % 64 == 0


def test_a_read_view_outlives_the_buffer() -> None:
    pool = MemoryPool()
    x = pool.empty((4, 5)).fill_(2.0)
    kept, address = pool.read_view(x), x.data_ptr()
    del x
    assert kept.tolist() == [[2.0] * 5] * 4
    assert pool.empty((20,)).data_ptr() == address


def test_an_empty_graph_runs() -> None:
    KernelGraph([]).replay()


def test_a_profile_names_the_kernels() -> None:
    x, y = torch.arange(LENGTH), torch.zeros(LENGTH, dtype=torch.int64)
    profile = time_launches(graph_of(x, y), 2)
    assert list(profile) == ["shift"]
    assert profile["shift"] > 0
