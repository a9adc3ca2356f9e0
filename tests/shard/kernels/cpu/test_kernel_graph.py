"""Taped kernels: run in order by all threads, again and again, on memory that stays."""

from collections.abc import Iterator
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray
from torch import Tensor

from tgis.shard.kernels.cpu.jit import compiler
from tgis.shard.kernels.cpu.jit.compiler import Kernel, pointer, take
from tgis.shard.kernels.cpu.kernel_graph import Pool, Recorder, Tape

_I64 = np.int64(0)
LENGTH, STEPS = 1000, 200


def _shift(args: Any) -> None:
    """Every unit reads what units of the kernel before have written, most of them on other threads."""
    a = carray(args, 5)
    x, out = carray(pointer(a[2], _I64), (a[1],)), carray(pointer(a[3], _I64), (a[1],))
    unit = take(args)
    while unit < a[1]:
        out[unit] = 3 * x[(unit * 7 + a[4]) % a[1]] + 1
        unit = take(args)


shift = Kernel(_shift)


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def shift_often(x: Tensor, y: Tensor) -> None:
    for step in range(STEPS):
        run = shift if step % 3 == 0 else shift.spread
        run(len(x), x.data_ptr(), y.data_ptr(), step)
        x, y = y, x


def expected(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    units = np.arange(len(x))
    for step in range(STEPS):
        x = 3 * x[(units * 7 + step) % len(x)] + 1
    return x


def tape_of(x: Tensor, y: Tensor) -> Tape:
    recorder = Recorder(Pool())
    with compiler.record(recorder):
        shift_often(x, y)
    return recorder.make_tape()


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_tape_does_what_the_calls_do(threads: int) -> None:
    x, y = torch.arange(LENGTH), torch.zeros(LENGTH, dtype=torch.int64)
    tape = tape_of(x, y)
    assert x.equal(torch.arange(LENGTH)), "nothing is computed while it is recorded"
    for start in range(3):
        x.copy_(torch.arange(LENGTH) + start)
        tape.run()
        assert (x.numpy() == expected(np.arange(LENGTH) + start)).all()


def test_only_the_thread_that_records_is_recorded() -> None:
    x, y = torch.arange(LENGTH), torch.zeros(LENGTH, dtype=torch.int64)
    with compiler.record(recorder := Recorder(Pool())):
        beside = Thread(target=lambda: shift(LENGTH, x.data_ptr(), y.data_ptr(), 0))
        beside.start()
        beside.join()
    recorder.make_tape().run()
    assert y[:2].tolist() == [1, 22]


def test_buffers_are_lent_again_when_nothing_sees_them() -> None:
    pool = Pool()
    first = pool.empty((3, 100))
    view = first[1:].flatten()
    address = first.data_ptr()
    del first
    other = pool.empty((3, 100))
    assert other.data_ptr() != address, "a view still sees it"
    del view
    assert pool.empty((290,)).data_ptr() == address
    assert pool.num_bytes == 2 * 2048
    assert other.data_ptr() % 64 == 0


def test_what_is_kept_outlives_the_buffer() -> None:
    pool = Pool()
    x = pool.empty((4, 5)).fill_(2.0)
    kept, address = pool.keep(x), x.data_ptr()
    del x
    assert kept.tolist() == [[2.0] * 5] * 4
    assert pool.empty((20,)).data_ptr() == address


def test_an_empty_tape_runs() -> None:
    Recorder(Pool()).make_tape().run()


def test_a_profile_names_the_kernels() -> None:
    x, y = torch.arange(LENGTH), torch.zeros(LENGTH, dtype=torch.int64)
    profile = tape_of(x, y).profile(2)
    assert list(profile) == ["shift"]
    assert profile["shift"] > 0
