"""Command for installations and images: compiles kernels on all cores and stores the code in the source's
directory. `python -m tgis.shard.kernels.cpu.precompile [--usual] [SOURCES]`. SOURCES is a directory that
contains this package; compiled code there is used where its sources are equal. Other kinds of processors
compile at the first start."""

import argparse
import gc
import hashlib
import importlib
import multiprocessing
import os
import pkgutil
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch

from tgis import shard
from tgis.shard.kernels.cpu import kernel_graph
from tgis.shard.kernels.cpu.amx import permission
from tgis.shard.kernels.cpu.attention.kernels import ATTEND, WRITE
from tgis.shard.kernels.cpu.bf16 import tiles
from tgis.shard.kernels.cpu.bf16.attention import PAIRS, TILES
from tgis.shard.kernels.cpu.bf16.kernels import MULTIPLY_PAIRS
from tgis.shard.kernels.cpu.codes import look_up, packing
from tgis.shard.kernels.cpu.codes.kernels import MULTIPLY
from tgis.shard.kernels.cpu.codes.layout import Kind
from tgis.shard.kernels.cpu.codes.tiles.kernels import KERNELS_ON_TILES
from tgis.shard.kernels.cpu.gemm import pairs
from tgis.shard.kernels.cpu.gemm.pack import PACK
from tgis.shard.kernels.cpu.jit.cache import cache_directory, keep_beside_source, packaged_files
from tgis.shard.kernels.cpu.jit.compiler import Kernel
from tgis.shard.kernels.cpu.pointwise import activations, elementwise, heads, norms

# Modules that need triton, which torch's build for CPUs lacks.
_OF_GPUS = tuple(
    f"{shard.__name__}.{name}"
    for name in ("kernels.cuda.", "runner.device.", "startup.platforms.cuda", "startup.platforms.gpu.")
)
_OF_EVERY_ARITHMETIC = (
    packing.pack_codes,
    look_up.look_up,
    norms.RMS_NORM[torch.float32],
    activations.multiply_gated,
    heads.angles,
    heads.split_heads,
    elementwise.change,
    kernel_graph.replay,
)
_KINDS = tuple(Kind(bits, rounds_activations=False) for bits in (4, 8))
# Objects between two garbage collections. With Python's default, collections take a tenth of the time.
_OBJECTS = 500_000


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="precompile", description="Compile kernels and store the code.")
    parser.add_argument("--usual", action="store_true", help="only kernels of GGUF models with 4-bit weights")
    parser.add_argument("sources", nargs="?", type=Path, help="directory with a package with compiled code")
    options = parser.parse_args(arguments)
    keep_beside_source()
    compile_all(usual_kernels() if options.usual else all_kernels(), options.sources)


def usual_kernels() -> tuple[Kernel, ...]:
    """Return the kernels of a model in the format GGUF with 4-bit weights, such as `make run` serves, for the
    arithmetic that this processor computes fastest. What takes longest to compile comes first."""
    has_tiles = permission.may_use_tiles()
    if not (has_tiles or pairs.are_fast()):
        attention = (ATTEND[torch.float32], WRITE[torch.float32])
        return (*attention, *_multiply_codes(), *_OF_EVERY_ARITHMETIC)
    assert PAIRS is not None
    pack = PACK[torch.float32.itemsize]
    if has_tiles:
        assert TILES is not None
        assert tiles.TILE_KERNELS is not None
        products = (
            *(KERNELS_ON_TILES[kind].multiply for kind in _KINDS),
            tiles.TILE_KERNELS.multiply,
            tiles.round_pairs,
            *(KERNELS_ON_TILES[kind].round_rows for kind in _KINDS),
        )
        return (TILES.attend, *products, TILES.write, *_OF_EVERY_ARITHMETIC, pack)
    assert MULTIPLY_PAIRS is not None
    products = (*_multiply_codes(), MULTIPLY_PAIRS)
    return (PAIRS.attend, *products, PAIRS.write, *_OF_EVERY_ARITHMETIC, pack)


def _multiply_codes() -> list[Kernel]:
    return [MULTIPLY[kind] for kind in _KINDS]


def compile_all(kernels: Sequence[Kernel], sources: Path | None = None) -> None:
    """Compile kernels and store the code, or copy it from the package in `sources`. Exit with an error if
    that fails."""
    num_workers = len(os.sched_getaffinity(0))
    if sources is not None:
        _copy_compiled(sources, kernels)
    # Kernels with the same name are variants of one function and share an index file of compiled code, so one
    # process compiles all of them.
    by_name: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        by_name[kernel.name].append(kernel)
    groups = list(by_name.values())
    fork = multiprocessing.get_context("fork")
    gc.freeze()  # what the workers share is no garbage
    turn = fork.Value("i", 0)
    workers = [fork.Process(target=_compile, args=(groups, turn)) for _ in range(num_workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    num_files = len(packaged_files())
    if any(worker.exitcode for worker in workers) or num_files < len(kernels):
        sys.exit(f"error: only {num_files} of {len(kernels)} kernels were compiled and stored")
    print(f"compiled {len(kernels)} kernels")


def _copy_compiled(sources: Path, kernels: Iterable[Kernel]) -> None:
    """Copy the kernels' code that the same package in `sources` has stored. Numba names its directories after
    the paths of sources, and compiles again what does not fit."""
    target = Path(shard.__path__[0])
    origin = sources.resolve() / target.parent.name / target.name
    folders = [folder.relative_to(target) for folder in target.rglob("*") if folder.is_dir()]
    names = {_numba_name(origin / folder): _numba_name(target / folder) for folder in folders}
    for directory in filter(None, {cache_directory(kernel.function) for kernel in kernels}):
        for stored in (origin / directory.relative_to(target)).glob("*"):
            if stored.name in names:
                shutil.copytree(stored, directory / names[stored.name], dirs_exist_ok=True)


def _numba_name(folder: Path) -> str:
    path = hashlib.sha1(str(folder).encode(), usedforsecurity=False)
    return f"{folder.name}_{path.hexdigest()}"


def all_kernels() -> list[Kernel]:
    """Import all modules of the shard except those for GPUs, and return the kernels that they create."""
    for module in pkgutil.walk_packages(shard.__path__, f"{shard.__name__}."):
        if not module.name.startswith(_OF_GPUS):
            importlib.import_module(module.name)
    return [one for one in gc.get_objects() if type(one) is Kernel]


def _compile(groups: Sequence[Sequence[Kernel]], turn: "Synchronized[int]") -> None:
    """Compile group after group. `turn` is the index of the first group that no process has taken."""
    gc.set_threshold(_OBJECTS)
    while True:
        with turn.get_lock():
            index = turn.value
            turn.value += 1
        if index >= len(groups):
            return
        for kernel in groups[index]:
            assert kernel.address  # reading the address compiles the kernel


if __name__ == "__main__":
    main()
