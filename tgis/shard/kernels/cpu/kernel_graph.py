"""Kernel graphs: recorded kernel launches of a step that are replayed without Python, the CPU's counterpart
of CUDA graphs. All threads run through the list, so no thread is woken between two kernels.

A thread goes on to the next kernel when no unit of work is left and all threads that have entered the kernel
have left it. It does not wait for a thread that has not entered, which may have lost its processor to another
process: the others do its share."""

import math
import weakref
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray
from torch import Tensor

from tgis.shard.kernels.cpu.huge_pages import Arena
from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import (
    Kernel,
    Launch,
    atomic_add,
    llvm_function,
    load_acquire,
    operands,
    ordered,
    pointer,
)
from tgis.shard.kernels.cpu.jit.llvm import I64
from tgis.shard.kernels.cpu.jit.waiting import call_function, full_fence, library_address, pause

_ALIGNMENT = 64
# Polls before a waiting thread yields its processor, which the awaited thread may need.
_MAX_POLLS = 2000
_I64 = np.int64(0)


class MemoryPool:
    """Memory of kernel graphs. A buffer is free after its last view is deleted, so graphs that are captured
    one after the other, and replayed one at a time, share memory."""

    def __init__(self) -> None:
        self._arena = Arena()
        self._free: dict[int, list[Any]] = defaultdict(list)
        self._lent: dict[int, weakref.ref[Any]] = {}
        self._slabs: dict[int, Any] = {}  # by address
        self.num_bytes = 0

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Return uninitialised float32 memory."""
        count = math.prod(shape)
        # Sizes are rounded up so that similar ones can share buffers.
        size = max(_ALIGNMENT, 1 << (4 * count - 1).bit_length())
        slab = self._take(size)
        view = slab[: 4 * count].view(np.float32)
        key = id(view)

        def give_back(_: Any) -> None:
            del self._lent[key]
            self._free[len(slab)].append(slab)

        self._lent[key] = weakref.ref(view, give_back)
        return torch.from_numpy(view).view(shape)

    def read_view(self, x: Tensor) -> Tensor:
        """Return a view of x for reading after a replay. It does not keep the buffer allocated. x begins at
        the beginning of its buffer, and may have some of its columns only."""
        slab = self._slabs[x.data_ptr()]
        return torch.from_numpy(slab.view(np.float32)).as_strided(x.shape, x.stride())

    def _take(self, size: int) -> Any:
        """Return the smallest free buffer of at least `size` bytes, so that graphs of few tokens need no more
        memory than those of many."""
        fitting = [each for each, slabs in self._free.items() if slabs and each >= size]
        return self._free[min(fitting)].pop() if fitting else self._allocate(size)

    def _allocate(self, size: int) -> Any:
        self.num_bytes += size
        slab = self._arena.allocate(size).numpy()
        self._slabs[slab.ctypes.data] = slab
        return slab


class KernelGraph:
    """Ordered kernel launches. The memory that their arguments point to must not move."""

    def __init__(self, launches: list[Launch]) -> None:
        self.launches = launches
        # A kernel counts its units of work in its first argument, so the arguments of kernels have separate
        # cache lines.
        width = max((len(launch.args) + 1 for launch in launches), default=1)
        self._args = _aligned(len(launches), width)
        for row, launch in zip(self._args, launches, strict=True):
            row[1 : len(launch.args) + 1] = launch.args
        addresses = [row.ctypes.data for row in self._args]
        rows = [(launch.kernel.address, args) for launch, args in zip(launches, addresses, strict=True)]
        self._table = np.array(rows, np.int64)  # [num_kernels, 2]
        self._threads = _aligned(len(launches), 1)
        self._checks = {launch.check for launch in launches if launch.check is not None}

    def replay(self) -> None:
        """Run the kernels on all of torch's threads, and then their checks, each once."""
        self._args[:, 0] = 0
        self._threads[:] = 0
        addresses = (
            self._table.ctypes.data,
            self._threads.ctypes.data,
            self._threads.strides[0],
            _SCHED_YIELD,
        )
        replay.parallel(len(self.launches), *addresses)
        for check in self._checks:
            check()


def _aligned(count: int, width: int) -> Any:
    """Return zeros, int64 [count, width], whose rows are in separate cache lines."""
    line = _ALIGNMENT // 8
    pitch = -(-width // line) * line
    memory = np.zeros(count * pitch + line, np.int64)
    begin = -memory.ctypes.data % _ALIGNMENT // 8
    return memory[begin : begin + count * pitch].reshape(count, pitch)


_SCHED_YIELD = library_address("sched_yield")
_VOID_OF_ADDRESS = ir.FunctionType(ir.VoidType(), [I64.as_pointer()])


@llvm_function()
def _call_kernel(b: Any, entry: Any, args: Any) -> None:
    b.call(llvm.pointer_to(b, _VOID_OF_ADDRESS, entry), [llvm.pointer_to(b, I64, args)])


# The upper half of a kernel's word counts the threads that have entered it, the lower half those that left.
_enter = atomic_add(1 << 32, "acq_rel")
_leave = atomic_add(1, "acq_rel")


@ordered
def _await_others(threads: Any, yield_address: int) -> None:
    """Wait until all threads that have entered a kernel have left it."""
    polls = 0
    word = load_acquire(threads)
    while word >> 32 != word & 0xFFFFFFFF:
        pause()
        polls += 1
        if polls > _MAX_POLLS:
            call_function(yield_address)
        word = load_acquire(threads)


def _replay(args: Any) -> None:
    num_kernels, table_address, threads_address, stride, yield_address = operands(args, 1, 5)
    table = carray(pointer(table_address, _I64), (num_kernels, 2))
    for i in range(num_kernels):
        threads = pointer(threads_address + stride * i, _I64)
        _enter(threads)
        # Units are taken without an order. With the fences, a thread that finds none left knows of all
        # threads that have taken one.
        full_fence()
        _call_kernel(table[i, 0], table[i, 1])
        full_fence()
        _leave(threads)
        _await_others(threads, yield_address)


replay = Kernel(_replay)
