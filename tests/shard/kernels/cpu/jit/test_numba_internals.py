"""Private parts of numba that `numba_internals.py` uses."""

from typing import Any

import numba
import numpy as np
import pytest
from numba import carray
from numba.core.codegen import JITCodeLibrary

from tgis.shard.kernels.cpu.jit import cache
from tgis.shard.kernels.cpu.jit.compiler import Kernel, ordered, overload_for_kernels

MOVED = f"numba {numba.__version__} is not what numba_internals.py was checked with"


@ordered
def _double(x: int) -> int:
    return x * 2


def _add_one(x: Any) -> Any:
    raise NotImplementedError


@overload_for_kernels(_add_one)
def _choose(x: Any) -> Any:
    def add_one(x: Any) -> Any:
        return _double(x) // 2 + 1

    return add_one


def _change(args: Any) -> None:
    a = carray(args, 2)
    a[1] = _add_one(_double(a[1]))


def test_only_the_kernel_has_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that a kernel calls are part of its machine code, and have none of their own."""
    names: list[str] = []
    generate = JITCodeLibrary._finalize_specific

    def record(library: Any) -> None:
        names.append(library.name)
        generate(library)

    monkeypatch.setattr(JITCodeLibrary, "_finalize_specific", record)
    monkeypatch.setattr(cache, "_bases", [])  # nothing is read from a cache
    kernel = Kernel(_change)
    args = np.array([0, 20], np.int64)
    kernel._entry(args.ctypes.data)
    assert args[1] == 41
    assert {"_change"} <= {*names} <= {"_change", "nrt", "impl_carray.<locals>.impl"}, MOVED
