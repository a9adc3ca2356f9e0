"""Command for building images: compiles all kernels and stores the code in the source's directory.
`python -m tgis.shard.kernels.cpu.jit.precompile`. Other kinds of processors compile at the first start."""

import gc
import importlib
import multiprocessing
import os
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Iterable

from tgis import shard
from tgis.shard.kernels.cpu.jit.cache import keep_beside_source, packaged_files
from tgis.shard.kernels.cpu.jit.compiler import Kernel

# Modules that need triton, which torch's build for CPUs lacks.
_OF_GPUS = tuple(f"{shard.__name__}.{name}" for name in ("kernels.cuda.", "runner.device.", "startup.cuda"))


def main() -> None:
    keep_beside_source()
    kernels, num_workers = _all_kernels(), len(os.sched_getaffinity(0))
    # Kernels with the same name are variants of one function and share an index file of compiled code, so one
    # process compiles all of them.
    by_name: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        by_name[kernel.name].append(kernel)
    groups, fork = list(by_name.values()), multiprocessing.get_context("fork")
    workers = [fork.Process(target=_compile, args=(groups[i::num_workers],)) for i in range(num_workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    num_files = len(packaged_files())
    if any(worker.exitcode for worker in workers) or num_files < len(kernels):
        sys.exit(f"error: only {num_files} of {len(kernels)} kernels were compiled and stored")
    print(f"compiled {len(kernels)} kernels")


def _all_kernels() -> list[Kernel]:
    """Import all modules of the shard except those for GPUs, and return the kernels that they create."""
    for module in pkgutil.walk_packages(shard.__path__, f"{shard.__name__}."):
        if not module.name.startswith(_OF_GPUS):
            importlib.import_module(module.name)
    return [one for one in gc.get_objects() if type(one) is Kernel]


def _compile(groups: Iterable[Iterable[Kernel]]) -> None:
    for group in groups:
        for kernel in group:
            assert kernel.address  # reading the address compiles the kernel


if __name__ == "__main__":
    main()
