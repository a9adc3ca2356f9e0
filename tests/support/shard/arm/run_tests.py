"""Runs tests with kernels that are compiled for ARM and emulated: `python -m
tests.support.shard.arm.run_tests PROCESSOR [arguments of pytest]`. PROCESSOR is a name in
`target.PROCESSORS`."""

import sys
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.shard.arm import target
from tests.support.shard.arm.emulator import Emulator


def main(processor: str, *arguments: str) -> int:
    emulate_kernels(processor)
    return pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", *arguments])


def emulate_kernels(processor: str) -> None:
    """Compile this process's kernels for a processor of `target.PROCESSORS`, and run them in an emulator on
    one thread. Numba must not be imported yet. The code is not stored on disk."""
    target.use(processor)
    from tgis.shard.kernels.cpu.jit import cache, compiler

    cache._bases[:] = []
    emulator, compile_kernel = Emulator(processor), compiler._compile

    def compile_and_load(function: Any) -> SimpleNamespace:
        return SimpleNamespace(address=emulator.load(compile_kernel(function)))

    def make_entry(kernel: compiler.Kernel) -> Any:
        return partial(emulator.call, kernel.address)

    entry = cached_property(make_entry)
    entry.__set_name__(compiler.Kernel, "_entry")
    patch = pytest.MonkeyPatch()  # never undone
    patch.setattr(compiler, "_compile", compile_and_load)
    patch.setattr(compiler, "_parallel", None)
    patch.setattr(compiler.Kernel, "_entry", entry)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
