"""Waits of kernels for other threads and processes, and calls of the C library by address."""

import ctypes
from typing import Any

from llvmlite import ir
from numba import types

from tgis.shard.kernels.cpu.jit import llvm
from tgis.shard.kernels.cpu.jit.compiler import address_of, llvm_function
from tgis.shard.kernels.cpu.jit.llvm import I32, I64

# Architecture -> intrinsic that marks a spin loop for the processor, and its arguments.
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.hint", (1,))}


def library_address(name: str) -> int:
    """Return the address of a function of the C library."""
    return address_of(getattr(ctypes.CDLL(None), name))


@llvm_function()
def pause(b: Any) -> None:
    """Mark a spin loop for the processor."""
    if llvm.architecture() in _PAUSES:
        name, numbers = _PAUSES[llvm.architecture()]
        llvm.call(b, name, ir.VoidType(), *(I32(number) for number in numbers))


@llvm_function(types.int64)
def call_function(b: Any, function: Any) -> Any:
    """Call the C function int() at an address and return its result."""
    return _call(b, function)


@llvm_function(types.int64)
def call_with_two(b: Any, function: Any, first: Any, second: Any) -> Any:
    """Call the C function at an address with two integers or pointers and return its result, an int."""
    return _call(b, function, first, second)


@llvm_function(types.int64)
def call_with_four(b: Any, function: Any, first: Any, second: Any, third: Any, fourth: Any) -> Any:
    """Call the C function at an address with four integers or pointers and return its result, an int."""
    return _call(b, function, first, second, third, fourth)


@llvm_function(types.int64)
def call_with_five(
    b: Any, function: Any, first: Any, second: Any, third: Any, fourth: Any, fifth: Any
) -> Any:
    """Do the same with five arguments."""
    return _call(b, function, first, second, third, fourth, fifth)


@llvm_function()
def full_fence(b: Any) -> None:
    """Make all earlier writes of this thread visible before its later reads."""
    b.fence("seq_cst")


def _call(b: Any, function: Any, *args: Any) -> Any:
    # Each argument has a register of 64 bits, of which an int is the lower half.
    kind = ir.FunctionType(I32, [I64] * len(args))
    return b.sext(b.call(llvm.pointer_to(b, kind, function), args), I64)
