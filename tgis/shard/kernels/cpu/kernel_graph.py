"""Kernel graphs: record a step's kernel launches once and replay them, the CPU's counterpart of a CUDA graph.
All threads run the list together, so between two kernels no Python runs and no thread is woken."""

import ctypes
import math
import platform
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from torch import Tensor

from tgis.shard.kernels.cpu.jit.compiler import Kernel, address_of, intrinsic, pointer, team_size_address

_ALIGNMENT = 64
# Iterations of busy waiting after which a thread yields its processor, which the awaited thread may need.
_PATIENCE = 2000
# For each architecture, the intrinsic that tells the processor that a loop waits, and its arguments.
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.hint", (1,))}
_I64 = np.int64(0)


class Pool:
    """Memory of kernel graphs. A buffer is free again when the last view of it is gone, so graphs that are
    captured one after the other, and replayed one at a time, share memory."""

    def __init__(self) -> None:
        self._free: dict[int, list[Any]] = defaultdict(list)
        self._lent: dict[int, weakref.ref[Any]] = {}
        self._slabs: dict[int, Any] = {}  # by address
        self.num_bytes = 0

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Return uninitialised float32."""
        count = math.prod(shape)
        # Sizes are rounded up so that similar ones can share buffers.
        size = max(_ALIGNMENT, 1 << (4 * count - 1).bit_length())
        slab = self._free[size].pop() if self._free[size] else self._allocate(size)
        view = slab[: 4 * count].view(np.float32)
        key = id(view)

        def give_back(_: Any) -> None:
            del self._lent[key]
            self._free[size].append(slab)

        self._lent[key] = weakref.ref(view, give_back)
        return torch.from_numpy(view).view(shape)

    def keep(self, x: Tensor) -> Tensor:
        """Return a view of x, to be read after a replay, that does not reserve the buffer."""
        slab = self._slabs[x.data_ptr()]
        return torch.from_numpy(slab[: 4 * x.numel()].view(np.float32)).view(x.shape)

    def _allocate(self, size: int) -> Any:
        self.num_bytes += size
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        begin = -memory.ctypes.data % _ALIGNMENT
        slab = memory[begin : begin + size]
        self._slabs[slab.ctypes.data] = slab
        return slab


class Call(NamedTuple):
    kernel: Kernel
    args: tuple[int, ...]


class Recorder:
    """Recorder of kernel calls for `compiler.record`, from which a `Tape` is made."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._calls = pool, list[Call]()

    def note(self, kernel: Kernel, args: tuple[int, ...]) -> None:
        self._calls.append(Call(kernel, args))

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        return self._pool.empty(shape)

    def make_tape(self) -> "Tape":
        return Tape(self._calls)


class Tape:
    """Kernel graph: kernel calls in their order. The memory that their arguments point to must not move."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls
        # A kernel counts its units of work in its first argument, so no two kernels may share a cache line.
        self._args = [_aligned([0, *call.args]) for call in calls]
        rows = [(call.kernel.address, args.ctypes.data) for call, args in zip(calls, self._args, strict=True)]
        self._table = np.array(rows, np.int64)  # [num_kernels, 2]
        self._arrived = _aligned([0])

    def run(self) -> None:
        """Replay the kernels on all of torch's threads."""
        self._arrived[0] = 0
        addresses = (self._table.ctypes.data, self._arrived.ctypes.data, *_FUNCTIONS)
        walk.spread(len(self._calls), *addresses)

    def profile(self, times: int, name: Callable[[Call], str] | None = None) -> dict[str, float]:
        """Return the seconds that a replay spends in the kernels of each name, the mean of `times` runs.

        Each kernel runs by itself. `name` may give the calls of one kernel different names."""
        spent: dict[str, float] = defaultdict(float)
        for _ in range(times):
            for call in self._calls:
                begin = time.perf_counter()
                call.kernel.spread(*call.args)
                seconds = time.perf_counter() - begin
                spent[name(call) if name else call.kernel.name] += seconds
        return {name: seconds / times for name, seconds in spent.items()}


def _aligned(values: list[int]) -> Any:
    """Return the values as int64 in cache lines of their own."""
    memory = np.zeros(len(values) + 2 * _ALIGNMENT // 8, np.int64)
    begin = -memory.ctypes.data % _ALIGNMENT // 8
    memory[begin : begin + len(values)] = values
    return memory[begin : begin + len(values)]


# Addresses of the functions that yield the processor and that return the number of threads.
_FUNCTIONS = (address_of(ctypes.CDLL(None).sched_yield), team_size_address())
_VOID_OF_ADDRESS = ir.FunctionType(ir.VoidType(), [ir.IntType(64).as_pointer()])
_INT_OF_NOTHING = ir.FunctionType(ir.IntType(32), [])


@intrinsic
def _call(typingctx: Any, entry: Any, args: Any) -> Any:
    """Run the kernel whose machine code is at `entry`."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        entry, args = values
        b.call(
            b.inttoptr(entry, _VOID_OF_ADDRESS.as_pointer()), [b.inttoptr(args, ir.IntType(64).as_pointer())]
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _ask(typingctx: Any, function: Any) -> Any:
    """Call the machine code int() at an address and return its result."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        answer = b.call(b.inttoptr(values[0], _INT_OF_NOTHING.as_pointer()), [])
        return b.sext(answer, ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def _arrive(typingctx: Any, counter: Any) -> Any:
    """Return the incremented counter. Threads that read it also see this thread's earlier writes."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        one = ir.Constant(ir.IntType(64), 1)
        return b.add(b.atomic_rmw("add", values[0], one, "acq_rel"), one)

    return types.int64(counter), generate


@intrinsic
def _await(typingctx: Any, counter: Any, wanted: Any, yields: Any) -> Any:
    """Wait until the counter has reached `wanted`. Yield the processor meanwhile by calling `yields`."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        counter, wanted, yields = values
        i64 = ir.IntType(64)
        before = b.block
        look, wait, offer, done = (b.append_basic_block(name) for name in ("look", "wait", "offer", "done"))
        b.branch(look)
        b.position_at_end(look)
        turns = b.phi(i64)
        turns.add_incoming(i64(0), before)
        count = b.load_atomic(counter, "acquire", 8)
        b.cbranch(b.icmp_signed("<", count, wanted), wait, done)
        b.position_at_end(wait)
        more = b.add(turns, i64(1))
        _pause(b)
        turns.add_incoming(more, wait)
        b.cbranch(b.icmp_signed(">", more, i64(_PATIENCE)), offer, look)
        b.position_at_end(offer)
        b.call(b.inttoptr(yields, _INT_OF_NOTHING.as_pointer()), [])
        turns.add_incoming(more, offer)
        b.branch(look)
        b.position_at_end(done)
        return context.get_dummy_value()

    return types.void(counter, wanted, yields), generate


def _pause(b: Any) -> None:
    if platform.machine() in _PAUSES:
        name, numbers = _PAUSES[platform.machine()]
        i32 = ir.IntType(32)
        function = ir.FunctionType(ir.VoidType(), [i32] * len(numbers))
        b.call(b.module.declare_intrinsic(name, (), function), [i32(number) for number in numbers])


def _walk(args: Any) -> None:
    a = carray(args, 6)
    num_kernels, yields = a[1], a[4]
    table = carray(pointer(a[2], _I64), (num_kernels, 2))
    arrived = pointer(a[3], _I64)
    num_threads = _ask(a[5]) if a[5] else 1
    for i in range(num_kernels):
        _call(table[i, 0], table[i, 1])
        wanted = (i + 1) * num_threads
        if _arrive(arrived) == wanted:
            carray(pointer(table[i, 1], _I64), 1)[0] = 0  # for the next replay; all threads have left it
        else:
            _await(arrived, wanted, yields)


walk = Kernel(_walk)
