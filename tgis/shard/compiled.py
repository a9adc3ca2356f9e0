"""Kernels written in Python: numba compiles one when it is first called, torch's own OpenMP threads run it.

Sharing torch's pool is why numba's parallel loops are not used: their OpenMP layer asks the system for a second
runtime, which slim images lack, and their built-in one costs a hundred microseconds a call. A kernel takes one argument,
the address of its arguments; its threads share the units of work by counting `args[0]` up with `take`."""

import ctypes
import logging
import struct
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import numba
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

# Sums may be reordered and fused, but only as the shapes decide; NaN and infinity stay what they are.
FAST = {"reassoc", "contract", "nsz", "arcp"}

_ADDRESS = types.CPointer(types.int64)
_WORD = ir.IntType(64)


class Kernel:
    """`kernel(*args)` runs `function(args)` on this thread, `kernel.spread(*args)` on all of torch's threads at once.

    The arguments are integers: sizes, addresses, and floats through `as_bits`. Raises nothing, checks nothing."""

    def __init__(self, function: Callable[[Any], None]):
        self._function = function

    def __call__(self, *args: int) -> None:
        self._entry((ctypes.c_int64 * (len(args) + 1))(0, *args))

    def spread(self, *args: int) -> None:
        num_threads = torch.get_num_threads()
        if num_threads == 1 or _openmp is None:
            self(*args)
        else:
            _openmp.GOMP_parallel(self._entry, (ctypes.c_int64 * (len(args) + 1))(0, *args), num_threads, 0)

    @cached_property
    def _entry(self) -> Callable[..., None]:
        compiled = _compile(self._function)
        self._kept = compiled  # the machine code lives as long as this object
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)


def _compile(function: Callable[[Any], None]) -> Any:
    signature = types.void(_ADDRESS)
    try:
        return numba.cfunc(signature, cache=True, error_model="numpy")(function)
    except (RuntimeError, OSError) as error:
        logger.info("compiled kernels are not kept: %s", error)
        return numba.cfunc(signature, error_model="numpy")(function)


def _find_openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime torch has loaded; None, and one thread, where it is another than GNU's."""
    try:
        return ctypes.CDLL("libgomp.so.1")
    except OSError:
        logger.warning("torch's OpenMP runtime was not found: kernels run on one thread")
        return None


_openmp = _find_openmp()


def inner(function: Function) -> Function:
    """Marks a function that kernels call."""
    compiled: Function = numba.njit(fastmath=FAST, error_model="numpy", nogil=True)(function)
    return compiled


def as_bits(value: float) -> int:
    """A float as a kernel's argument; `as_float` is the way back."""
    return int.from_bytes(struct.pack("=d", value), "little", signed=True)


@intrinsic
def as_float(typingctx: Any, bits: Any) -> Any:
    """Inside a kernel: the float32 that `as_bits` packed."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.fptrunc(b.bitcast(args[0], ir.DoubleType()), ir.FloatType())

    return types.float32(types.int64), generate


@intrinsic
def take(typingctx: Any, args: Any) -> Any:
    """Inside a kernel: the number of a unit of work that no other thread gets."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        return b.atomic_rmw("add", values[0], ir.Constant(_WORD, 1), "monotonic")

    return types.int64(args), generate


@intrinsic
def pointer(typingctx: Any, address: Any, element: Any) -> Any:
    """Inside a kernel: an address as a pointer to values of `element`'s type, for `numba.carray`."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(element)(types.int64, element), generate
