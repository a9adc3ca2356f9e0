"""Kernels written in Python: numba compiles one when it is first called, torch's own OpenMP threads run it.

Sharing torch's threads is why numba's parallel loops are not used: their OpenMP layer asks the system for a
second runtime, which slim images lack, and their built-in one costs a hundred microseconds a call. A kernel
takes the address of its arguments; its threads share the units of work by counting `args[0]` up with `take`.
"""

import contextlib
import ctypes
import logging
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numba
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic as untyped_intrinsic
from torch import Tensor

from tgis.shard.checkpoint.progress import CompileProgress
from tgis.shard.kernels.cpu.jit.cache import cache_directory, tell_place

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

# Products may be fused into sums, and sums reordered as shapes decide; NaN and infinity stay what they are.
_FUSED = {"contract", "nsz"}
_REORDERED = _FUSED | {"reassoc", "arcp"}
_ADDRESS = types.CPointer(types.int64)


class Recorder(Protocol):
    """Takes down what a thread would compute, instead of its being computed."""

    def note(self, kernel: "Kernel", args: tuple[int, ...]) -> None: ...

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """float32 memory that stays where it is for as long as what was recorded is run."""


class _Recording(threading.local):
    recorder: Recorder | None = None


_recording = _Recording()
_compiling: list[Callable[..., Any]] = []  # by all threads
compile_progress = CompileProgress()


@contextlib.contextmanager
def record(recorder: Recorder) -> Iterator[None]:
    """Kernels that this thread calls meanwhile are noted and not run."""
    assert _recording.recorder is None, "one recording at a time"
    _recording.recorder = recorder
    try:
        yield
    finally:
        _recording.recorder = None


def empty(*shape: int) -> Tensor:
    """Uninitialised float32, for what a kernel writes."""
    recorder = _recording.recorder
    return torch.empty(shape) if recorder is None else recorder.empty(shape)


class Kernel:
    """`kernel(*args)` runs `function(args)` on this thread, `kernel.spread(*args)` on all of torch's at once.

    The arguments are integers: sizes, addresses, and floats through `as_bits`. Nothing is checked. However
    many threads enter, they share the work; one that finds none left returns."""

    def __init__(self, function: Callable[[Any], None]):
        self._function = function
        compile_progress.num_kernels += 1

    @property
    def name(self) -> str:
        return self._function.__name__.lstrip("_")

    @property
    def address(self) -> int:
        """Of the machine code: void (int64 *args), args[0] being 0 when the first thread enters."""
        address: int = self._compiled.address
        return address

    def __call__(self, *args: int) -> None:
        if _recording.recorder is not None:
            _recording.recorder.note(self, args)
            return
        memory = array("q", (0, *args))
        self._entry(memory.buffer_info()[0])

    def spread(self, *args: int) -> None:
        if _recording.recorder is not None:
            _recording.recorder.note(self, args)
            return
        num_threads = torch.get_num_threads()
        if num_threads == 1 or _parallel is None:
            self(*args)
        else:
            memory = array("q", (0, *args))
            _parallel(self._entry, memory.buffer_info()[0], num_threads, 0)

    @cached_property
    def _compiled(self) -> Any:
        """The machine code lives as long as this object."""
        return _compile(self._function)

    @cached_property
    def _entry(self) -> Callable[..., None]:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._compiled.address)


def is_compiling() -> bool:
    """Whether a kernel that nothing was kept of is being called for the first time."""
    return bool(_compiling)


def _compile(function: Callable[[Any], None]) -> Any:
    directory, began = cache_directory(function), time.monotonic()
    _compiling.append(function)
    try:
        compiled = _compile_or_read(function, directory)
    finally:
        _compiling.remove(function)
    if not compiled.cache_hits:
        compile_progress.add(time.monotonic() - began, tell_place(directory))
    return compiled


def _compile_or_read(function: Callable[[Any], None], directory: Path | None) -> Any:
    signature = types.void(_ADDRESS)
    if directory is None:
        return numba.cfunc(signature, error_model="numpy")(function)
    previous, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(directory)
    try:
        return numba.cfunc(signature, cache=True, error_model="numpy")(function)
    except Exception as error:  # a fault of the function itself shows again below
        logger.warning("compiled code cannot be kept: %s", error)
        return numba.cfunc(signature, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = previous


def _find_parallel() -> Callable[..., None] | None:
    """Of the OpenMP runtime that torch has loaded: runs a function with an argument on so many threads."""
    try:
        parallel = ctypes.CDLL("libgomp.so.1").GOMP_parallel
    except OSError:
        logger.warning("torch's OpenMP runtime was not found: some work runs on one thread")
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


_parallel = _find_parallel()


def team_size_address() -> int:
    """Of the machine code int() that tells a kernel how many threads have entered it; 0: one."""
    if _parallel is None:
        return 0
    return address_of(ctypes.CDLL("libgomp.so.1").omp_get_num_threads)


def address_of(function: Any) -> int:
    """Of the machine code of a library's function."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def inner(function: Function) -> Function:
    """Marks a function that kernels call."""
    compiled: Function = numba.njit(fastmath=_REORDERED, error_model="numpy", nogil=True)(function)
    return compiled


def ordered(function: Function) -> Function:
    """Marks a function that kernels call, whose sums and differences keep their order."""
    compiled: Function = numba.njit(fastmath=_FUSED, error_model="numpy", nogil=True)(function)
    return compiled


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function that gives a signature and the LLVM code of what kernels call by its name."""
    marked: Callable[..., Any] = untyped_intrinsic(function)
    return marked


def as_bits(value: float) -> int:
    """A float as a kernel's argument; `as_float` is the way back."""
    return int.from_bytes(struct.pack("<d", value), "little", signed=True)


@intrinsic
def as_float(typingctx: Any, bits: Any) -> Any:
    """In a kernel: what `as_bits` packed, as float32."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.fptrunc(b.bitcast(args[0], ir.DoubleType()), ir.FloatType())

    return types.float32(types.int64), generate


@intrinsic
def take(typingctx: Any, args: Any) -> Any:
    """In a kernel: the number of a unit of work that no other thread gets."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        return b.atomic_rmw("add", values[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(args), generate


@intrinsic
def keep(typingctx: Any, array: Any) -> Any:
    """In a kernel: memory that is used by its address lives until here. numba frees an array after the last
    line that names it."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return context.get_dummy_value()

    return types.void(array), generate


@intrinsic
def pointer(typingctx: Any, address: Any, element: Any) -> Any:
    """In a kernel: an address as a pointer to values of `element`'s type, for `numba.carray`."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(element)(types.int64, element), generate
