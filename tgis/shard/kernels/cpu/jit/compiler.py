"""Kernels written in Python. Numba compiles a kernel at its first call; torch's OpenMP threads run it.

Numba's parallel loops cannot share torch's threads: their OpenMP layer needs a second runtime from the
system, which slim images lack, and their built-in layer takes a hundred microseconds per call. A kernel
receives the address of its arguments. Its threads share the units of work by incrementing `args[0]` with
`next_unit`."""

import contextlib
import ctypes
import functools
import inspect
import logging
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numba
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic as untyped_intrinsic
from numba.extending import overload as untyped_overload
from torch import Tensor

from tgis.shard.checkpoint.progress import CompileProgress
from tgis.shard.kernels.cpu.jit.cache import cache_directory, describe_lifetime
from tgis.shard.kernels.cpu.jit.llvm import FLOAT, I64
from tgis.shard.kernels.cpu.jit.numba_internals import CalleeCompiler

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

# LLVM may fuse multiplications and additions (both) and reorder sums (_REORDERED). NaN and infinity are
# preserved.
_FUSED = {"contract", "nsz"}
_REORDERED = _FUSED | {"reassoc", "arcp"}
_ADDRESS = types.CPointer(types.int64)


class Launch(NamedTuple):
    kernel: "Kernel"
    args: tuple[int, ...]
    check: Callable[[], None] | None = None  # called after the kernel has run


class _Capture(threading.local):
    def __init__(self) -> None:
        self.launches: list[Launch] | None = None  # None: not capturing
        self.allocate: Callable[[tuple[int, ...]], Tensor] = torch.empty


_capture = _Capture()
_compiling: list[Callable[..., Any]] = []  # shared by all threads
compile_progress = CompileProgress()


@contextlib.contextmanager
def capture(allocate: Callable[[tuple[int, ...]], Tensor]) -> Iterator[list[Launch]]:
    """Record the kernel launches of this thread instead of running them. `allocate` returns uninitialised
    float32 memory for outputs, valid as long as the launches are replayed."""
    assert _capture.launches is None, "one capture at a time"
    launches = _capture.launches = []
    _capture.allocate = allocate
    try:
        yield launches
    finally:
        _capture.launches = None
        _capture.allocate = torch.empty


def empty(*shape: int) -> Tensor:
    """Return uninitialised float32 memory for a kernel's output."""
    return _capture.allocate(shape)


class Kernel:
    """Compiled function. `kernel(*args)` runs it on this thread, `kernel.parallel(*args)` on all threads.

    The arguments are integers: sizes, addresses, and floats converted by `as_bits`. They are not checked. Any
    number of threads may enter. They share the work, and each returns when none is left."""

    def __init__(self, function: Callable[[Any], None]):
        self.function = function

    @property
    def name(self) -> str:
        return self.function.__name__.lstrip("_")

    @property
    def address(self) -> int:
        """Address of the machine code, void (int64 *args). args[0] must be 0 when the first thread enters."""
        address: int = self._compiled.address
        return address

    def __call__(self, *args: int, check: Callable[[], None] | None = None) -> None:
        """Run the kernel, and then `check`, which may raise. In a capture, both are recorded."""
        if _capture.launches is not None:
            _capture.launches.append(Launch(self, args, check))
            return
        memory = array("q", (0, *args))
        self._entry(memory.buffer_info()[0])
        if check is not None:
            check()

    def parallel(self, *args: int) -> None:
        num_threads = torch.get_num_threads()
        if num_threads == 1 or _parallel is None or _capture.launches is not None:
            self(*args)
        else:
            memory = array("q", (0, *args))
            _parallel(self._entry, memory.buffer_info()[0], num_threads, 0)

    @functools.cached_property
    def _compiled(self) -> Any:
        """Compiled function. It owns the machine code."""
        return _compile(self.function)

    @functools.cached_property
    def _entry(self) -> Callable[..., None]:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._compiled.address)


def is_compiling() -> bool:
    """Return True while a kernel is being compiled or read from the cache."""
    return bool(_compiling)


def _compile(function: Callable[[Any], None]) -> Any:
    directory = cache_directory(function)
    began = time.monotonic()
    _compiling.append(function)
    try:
        compiled = _compile_or_read(function, directory)
    finally:
        _compiling.remove(function)
    if not compiled.cache_hits:
        compile_progress.add(time.monotonic() - began, describe_lifetime(directory))
    return compiled


def _compile_or_read(function: Callable[[Any], None], directory: Path | None) -> Any:
    signature = types.void(_ADDRESS)
    if directory is None:
        return numba.cfunc(signature, error_model="numpy")(function)
    previous = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(directory)
    try:
        return numba.cfunc(signature, cache=True, error_model="numpy")(function)
    except Exception as error:  # an error in the function itself is raised again below
        logger.warning("compiled code cannot be stored: %s", error)
        return numba.cfunc(signature, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = previous


def _find_parallel() -> Callable[..., None] | None:
    """Return `GOMP_parallel`, with which torch's OpenMP runtime runs a function on several threads."""
    try:
        parallel = ctypes.CDLL("libgomp.so.1").GOMP_parallel
    except OSError:
        logger.warning("torch's OpenMP runtime was not found: some work runs on one thread")
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


_parallel = _find_parallel()


def address_of(function: Any) -> int:
    """Return the address of a library's function."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def reorderable(function: Function) -> Function:
    """Compile a function for kernels. LLVM may reorder its sums to vectorise them."""
    return _for_kernels(function, _REORDERED)


def ordered(function: Function) -> Function:
    """Compile a function for kernels. LLVM keeps the order of its sums."""
    return _for_kernels(function, _FUSED)


def inlined(function: Function) -> Function:
    """Make a function part of its callers and of their treatment of sums. Each other function of a kernel is
    optimised once by itself and again as part of each of its callers, so large functions that are called at
    one place compile faster this way."""
    return _for_kernels(function, _FUSED, inline="always")


def _for_kernels(function: Function, fastmath: set[str], inline: str = "never") -> Function:
    """Compile a function that only compiled code may call; a call from Python ends the process. Without the
    wrappers for Python and C, each of which contains the function once more, kernels compile a sixth
    faster."""
    options = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    compile = numba.njit(fastmath=fastmath, inline=inline, pipeline_class=CalleeCompiler, **options)
    compiled: Function = compile(function)
    return compiled


def overload_for_kernels(stub: Function) -> Callable[[Callable[..., Any]], Any]:
    """Let a function return the implementation of `stub` for types of arguments. It becomes a part of its
    callers, as if it were `inlined`."""
    mark: Callable[[Callable[..., Any]], Any] = untyped_overload(
        stub, jit_options={"pipeline_class": CalleeCompiler}, inline="always"
    )
    return mark


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make an intrinsic of a function that returns a signature and a builder of LLVM code."""
    marked: Callable[..., Any] = untyped_intrinsic(function)
    return marked


def llvm_function(result: Any = types.void, takes: Any = types.int64) -> Callable[..., Any]:
    """Convert `build(b, *values)`, which emits LLVM code and returns its value, to a function for kernels.
    Arguments are converted to the type `takes`. For an argument named `element`, `build` receives the numba
    type instead of the value."""

    def mark(build: Callable[..., Any]) -> Any:
        names = list(inspect.signature(build).parameters)[1:]

        @functools.wraps(build)
        def typed(typingctx: Any, *given: Any) -> Any:
            kinds = [kind if name == "element" else takes for name, kind in zip(names, given, strict=True)]

            def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
                passed = zip(names, kinds, args, strict=True)
                value = build(b, *(kind if name == "element" else arg for name, kind, arg in passed))
                return context.get_dummy_value() if value is None else value

            return result(*kinds), generate

        return intrinsic(typed)

    return mark


def as_bits(value: float) -> int:
    """Pack a float as a kernel's argument. `as_float` is the inverse."""
    return int.from_bytes(struct.pack("<d", value), "little", signed=True)


@llvm_function(types.float32)
def as_float(b: Any, bits: Any) -> Any:
    """Convert the result of `as_bits` to float32."""
    return b.fptrunc(b.bitcast(bits, ir.DoubleType()), FLOAT)


def atomic_add(amount: int, ordering: str) -> Any:
    """Build a function for kernels that adds an amount to a counter and returns the previous value."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", args[0], I64(amount), ordering)

    def add(typingctx: Any, counter: Any) -> Any:
        return types.int64(counter), generate

    return intrinsic(add)


# Returns the number of a unit of work that no other thread gets. The argument is the kernel's `args`.
next_unit = atomic_add(1, "monotonic")


@untyped_intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def operands(typingctx: Any, args: Any, first: Any, count: Any) -> Any:
    """Return args[first : first + count] as a tuple of integers. A kernel's first argument is args[1]."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        places = [b.gep(values[0], [b.add(values[1], I64(i))]) for i in range(count.literal_value)]
        return context.make_tuple(b, signature.return_type, [b.load(place) for place in places])

    return types.UniTuple(types.int64, count.literal_value)(args, types.int64, count), generate


@intrinsic
def load_acquire(typingctx: Any, counter: Any) -> Any:
    """Read a counter. Writes of other threads before their last increment are visible afterwards."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load_atomic(args[0], "acquire", 8)

    return types.int64(counter), generate


@intrinsic
def store_release(typingctx: Any, counter: Any, value: Any) -> Any:
    """Write a counter. A thread that reads the value with `load_acquire` sees all earlier writes of this
    thread, and this thread's earlier reads are complete."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store_atomic(args[1], args[0], "release", 8)
        return context.get_dummy_value()

    return types.void(counter, types.int64), generate


@intrinsic
def keep_alive(typingctx: Any, array: Any) -> Any:
    """Keep an array alive that is used by address, because numba frees it after the last line that names
    it."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return context.get_dummy_value()

    return types.void(array), generate


@intrinsic
def pointer(typingctx: Any, address: Any, element: Any) -> Any:
    """Convert an address to a pointer to values of `element`'s type, for `numba.carray`."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(element)(types.int64, element), generate
