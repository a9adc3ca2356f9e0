"""Command that compiles the kernels of well-known models, for GPUs that the machine does not need to have,
and stores the code in the installation: `python -m tgis.shard.kernels.cuda.offline.precompile 80 89 90 100`.
It needs gcc and Python's headers for Triton's C code. Kernels that are compiled later need neither."""

import ctypes
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime.cache import FileCacheManager

from tgis.shard.kernels.cuda.implementations import KERNELS
from tgis.shard.kernels.cuda.kernel_cache import PACKAGED, make_keys_repeatable
from tgis.shard.kernels.cuda.offline.driver import MAX_SHARED_BYTES, compile_only
from tgis.shard.kernels.cuda.offline.variants import find_check_variants, find_variants

NUM_PARTS = 4  # parts of a kernel's variants, to share the work between processes


class Task(NamedTuple):
    capability: int
    kernel: str
    part: int


def main() -> None:
    known = [str(capability) for capability in MAX_SHARED_BYTES]
    if not sys.argv[1:] or not set(sys.argv[1:]) <= set(known):
        sys.exit(f"usage: precompile CAPABILITY..., each of {', '.join(known)}")
    capabilities = [int(text) for text in sys.argv[1:]]
    num_kernels, failed = precompile(PACKAGED, capabilities)
    print("\n".join([*failed, f"compiled {num_kernels} kernels in {PACKAGED}"]))


def precompile(directory: Path, capabilities: list[int]) -> tuple[int, list[str]]:
    """Compile into `directory`. Return the number of kernels, and a line for each launch that failed. On such
    GPUs, the kernel is replaced by its twin."""
    tasks = [
        Task(capability, kernel, part)
        for kernel in reversed(KERNELS)
        for capability in capabilities
        for part in range(NUM_PARTS)
    ]
    num_kernels = 0
    failed = []
    with tempfile.TemporaryDirectory() as stub:
        _build_stub(Path(stub) / "libcuda.so.1")
        # Triton's compiler has threads, which a forked process would not have.
        spawn = multiprocessing.get_context("spawn")
        arguments = str(directory), stub
        with ProcessPoolExecutor(len(os.sched_getaffinity(0)), spawn, _begin_worker, arguments) as pool:
            for number, lines in pool.map(_compile, tasks):
                num_kernels += number
                failed += lines
    return num_kernels, failed


def _begin_worker(directory: str, stub: str) -> None:
    _keep_in(directory)
    make_keys_repeatable()
    # The modules that Triton builds are linked with the driver's library and loaded after the build.
    ctypes.CDLL(f"{stub}/libcuda.so.1", ctypes.RTLD_GLOBAL)
    knobs.nvidia.libcuda_path = stub
    nvidia.CudaUtils()


def _keep_in(directory: str) -> None:
    knobs.cache.dir = directory
    knobs.cache.manager_class = FileCacheManager
    knobs.compilation.store_binary_only = True


def _compile(task: Task) -> tuple[int, list[str]]:
    known = find_variants() + find_check_variants()
    variants = [variant for variant in known if variant.kernel == task.kernel]
    size = -(-len(variants) // NUM_PARTS)  # neighbours share kernels
    failed = []
    with compile_only(task.capability, _make_launcher) as kernels:
        for variant in variants[task.part * size :][:size]:
            try:
                variant.run()
            except Exception as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                failed.append(f"sm_{task.capability}: {task.kernel} of {variant.label}: {reason}")
    return len(kernels), failed


def _make_launcher(source: object, metadata: object) -> None:
    if hasattr(nvidia, "make_launcher"):  # before Triton 3.7: a C module for each list of argument types
        nvidia.CudaLauncher(source, metadata)


def _build_stub(path: Path) -> None:
    """Build a library with all functions of the driver that Triton's modules use."""
    directory = Path(nvidia.__file__).parent
    sources = [(directory / name).read_text() for name in ("driver.c", "driver.py")]
    names = sorted({name for text in sources for name in re.findall(r"\bcu[A-Z]\w+(?=\()", text)})
    stub = "\n".join(f"int {name}(void) {{ return 1; }}" for name in names)
    compiler = ["gcc", "-x", "c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(path), "-"]
    subprocess.run(compiler, input=stub, text=True, check=True)


if __name__ == "__main__":
    main()
