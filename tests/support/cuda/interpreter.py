"""Triton kernels in its interpreter on the CPU, in addition to compiled kernels.

Triton chooses between the two when a kernel is declared, so the kernels' modules are imported twice."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter

from tgis.shard.kernels.cuda.implementations import KERNELS, Implementations

PACKAGE = "tgis.shard.kernels.cuda"
# Modules whose classes are shared by both copies.
SHARED = {f"{PACKAGE}.step_state"}


@cache
def interpreted() -> Implementations:
    """Return kernels that run on the CPU."""
    modules = interpreted_modules()
    return Implementations(**{name: modules[name].launch for name in KERNELS})


@cache
def interpreted_modules() -> dict[str, ModuleType]:
    """Return the copies of the kernels' modules by kernel name."""
    _correct()
    with _removed(), triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        return {name: importlib.import_module(module.__name__) for name, module in KERNELS.items()}


def interpret(kernel: Callable[..., None]) -> Any:
    """Return a test's own kernel, which may call functions of other kernels, in a form that runs on the
    CPU."""
    _correct()
    return interpreter.InterpretedFunction(kernel)


@contextmanager
def _removed() -> Iterator[None]:
    """Remove the package's modules, so that they are imported again; restore them afterwards."""
    package = sys.modules[PACKAGE]
    before, names = dict(vars(package)), [name for name in sys.modules if name.startswith(f"{PACKAGE}.")]
    kept = {name: sys.modules.pop(name) for name in names if name not in SHARED}
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith(f"{PACKAGE}.") and name not in SHARED]:
            del sys.modules[name]
        sys.modules.update(kept)
        vars(package).update(before)


@cache
def _correct() -> None:
    """Correct errors of the interpreter of Triton 3.6 and 3.7.

    It multiplies the bit patterns of bfloat16 numbers. On some processors, the bits of a float32 product
    depend on the row's position, so products are computed in float64 and rounded. It does not round to the
    nearest bfloat16, as GPUs do. NumPy 2.4 does not accept an array with one element as an index. Triton's
    own functions, such as max, were imported for compilation and cannot be called; they use the language
    through tl.core, so a launch must replace that too. Overflow yields infinity, as on GPUs, without a
    warning. It reads NaN of e4m3 as 480. Every operation looks up types in a new table, so the look-up is
    cached. Every operation on integers also computes whether it overflows, for an assertion that only the
    debug mode makes."""
    patch, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    convert, find_type = interpreter._convert_float, cache(interpreter._get_np_dtype)
    patch_lang, whole_language = (
        interpreter._patch_lang,
        SimpleNamespace(__globals__={"tl": tl, "core": tl.core}),
    )

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    def create_wide_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = _widen(a), _widen(b)
        if d.dtype.scalar != tl.float32:
            return create_dot(self, a, b, d, *rest)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, tl.float32)

    def convert_float(x: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if (source, target) == (tl.bfloat16, tl.float32):
            return x.astype(np.uint32) << 16
        if (source, target) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(x, np.float32)).bfloat16()
            return rounded.view(torch.uint16).numpy()
        if (source, target) == (tl.float8e4nv, tl.float16):
            codes = torch.from_numpy(np.ascontiguousarray(x).view(np.uint8))
            return codes.view(torch.float8_e4m3fn).half().view(torch.uint16).numpy()
        return convert(x, source, target, rounding_mode)

    def find_scalar_type(dtype: Any) -> Any:
        scalar = dtype.scalar
        return np.dtype(np.uint64) if scalar.is_ptr() else find_type(scalar)

    interpreter._patch_lang_tensor, interpreter._convert_float = patch_tensor, convert_float
    interpreter._get_np_dtype = find_scalar_type
    interpreter.InterpreterBuilder.create_dot = create_wide_dot
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)
    interpreter._patch_lang = lambda kernel: patch_lang(whole_language)
    triton.JITFunction.__call__ = _call
    interpreter.InterpretedFunction.__call__ = _call
    interpreter.GridExecutor.__call__ = np.errstate(over="ignore", invalid="ignore")(
        interpreter.GridExecutor.__call__
    )


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function in a kernel whose launch has replaced the language."""
    return _rewrite(function.fn)(*args, **kwargs)


@cache
def _rewrite(function: Callable[..., Any]) -> Callable[..., Any]:
    rewritten: Callable[..., Any] = interpreter.InterpretedFunction(function).rewrite()
    return rewritten


def _widen(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x
    bits = x.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)
