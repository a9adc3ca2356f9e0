"""Private parts of numba. No other file may use them.

Checked with numba 0.68.1. In use:

- `JITCodeLibrary._finalize_final_module`: numba generates machine code of every function by itself, although
  only its copy in the kernel is run. No option switches that off.

If a version changes it, kernels compile a fifth slower, or not at all.
tests/shard/kernels/cpu/jit/test_numba_internals.py says what has changed."""

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class _CalleeLibrary(JITCodeLibrary):  # type: ignore[misc]
    """Optimised LLVM code of a function that only compiled code calls."""

    @property
    def codegen(self) -> Any:
        return _NoEnvironment

    def get_pointer_to_function(self, name: str) -> int:
        return 0  # as of every function without a wrapper for Python

    def _finalize_final_module(self) -> None:
        self._verify_declare_only_symbols()
        self._finalized = True


class _NoEnvironment:
    """Stands for the owner of the machine code, which has none of a callee's global variables."""

    @staticmethod
    def set_env(name: str, environment: Any) -> None:
        """Do nothing: the environment of a function is for calls of Python, which kernels do not contain."""


class CalleeCompiler(Compiler):  # type: ignore[misc]
    """Compiles a function for other compiled code, without machine code. A call from Python ends the
    process."""

    def __init__(self, typing: Any, target: Any, library: Any, *options: Any):
        super().__init__(typing, target, library or _CalleeLibrary(target.codegen(), "callee"), *options)
