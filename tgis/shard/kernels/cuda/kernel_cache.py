"""Triton's just-in-time compiler: the cache of machine code, and whether a compilation is in progress.

Code is read from a directory of the installation, which `precompile` fills, and from a writable one, where
new code is stored. Kernels need no C compiler, but Triton's driver does and, before Triton 3.7, each list of
argument types does; `precompile` builds those too."""

import ctypes
import json
import logging
import os
import platform
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime import build
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import JITFunction

from tgis.shard.kernels.cpu.jit.cache import can_be_written, has_room, user_directories
from tgis.shard.kernels.cuda.implementations import KERNELS

logger = logging.getLogger(__name__)

MAX_COMPILE_S = 120.0  # a compilation that takes longer has failed
PACKAGED = Path(sys.prefix) / "triton"


class PackagedCache(FileCacheManager):  # type: ignore[misc]
    """Triton's cache of one key. Packaged files take precedence over those in `knobs.cache.dir`.

    Triton's groups refer to files by absolute paths. Here, the files of a group are those with the same names
    in its directory, so that a cache can be moved."""

    def get_file(self, filename: str) -> str | None:
        packaged = PACKAGED / self.key / filename
        if packaged.exists():
            return str(packaged)
        path: str | None = super().get_file(filename)
        return path

    def get_group(self, filename: str) -> dict[str, str] | None:
        group = self.get_file(f"__grp__{filename}")
        if group is None:
            return None
        names = json.loads(Path(group).read_text())["child_paths"]
        beside = ((name, os.path.join(os.path.dirname(group), name)) for name in names)
        return {name: path for name, path in beside if os.path.exists(path)}


def use_cache(directory: Path | None) -> None:
    """Store compiled code in the first writable directory of the user's cache directory, `directory` (the
    run's) and a temporary one. Only this user may have access to the parent of `directory`, because stored
    code is executed."""
    knobs.cache.manager_class = PackagedCache
    knobs.cache.dir = str(_choose(directory))
    logger.info("compiled GPU code is stored in %s", knobs.cache.dir)
    make_keys_repeatable()
    if (driver := _find_libcuda()) is not None:
        knobs.nvidia.libcuda_path = str(driver)
    knobs.runtime.jit_cache_hook = _begin
    knobs.runtime.jit_post_compile_hook = _end_warm_up
    knobs.runtime.kernel_load_end_hook.add(_end)


def make_keys_repeatable() -> None:
    """Make cache keys equal in all processes. Must be called before the first launch of a kernel."""
    # Triton calls the command `file`, which may exist where an image is built and not where it runs.
    build.platform_key = lambda: f"{platform.machine()},{platform.system()}"
    # The key of a kernel depends on which of its functions had keys before, so compute all keys in a fixed
    # order.
    for module in KERNELS.values():
        for function in vars(module).values():
            if isinstance(function, JITFunction):
                _ = function.cache_key


def is_compiling() -> bool:
    """Return True while a kernel is being compiled or loaded."""
    now = time.monotonic()
    return any(now - began < MAX_COMPILE_S for began in list(_began.values()))


_began: dict[int, float] = {}  # thread -> start of its compilation


def _begin(**_: Any) -> None:
    _began[threading.get_ident()] = time.monotonic()


def _end(*_: Any, **__: Any) -> None:
    _began.pop(threading.get_ident(), None)


def _end_warm_up(*, is_manual_warmup: bool, **_: Any) -> None:
    if is_manual_warmup:  # the kernel is not loaded, so _end is not called
        _end()


def _choose(directory: Path | None) -> Path:
    bases = [base / "triton" for base in user_directories()]
    if directory is not None and has_room(directory):
        bases.append(directory / "triton")
    return next(filter(can_be_written, bases), None) or Path(tempfile.mkdtemp(prefix="tgis-triton-"))


def _find_libcuda() -> Path | None:
    """Return the directory of the GPU's driver, if there is one. Triton would call ldconfig."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libcuda.so.") and (path.parent / "libcuda.so.1").exists():
            return path.parent
    return None
