"""Compiled code of one directory is found by another, and by another process."""

from pathlib import Path

from numba.core.caching import _CacheLocator
from numba.core.dispatcher import Dispatcher

from tgis.shard.kernels.cpu.precompile import _numba_name, all_kernels


def test_directories_have_the_names_that_numba_gives_them(tmp_path: Path) -> None:
    assert _numba_name(tmp_path) == _CacheLocator.get_suitable_cache_subpath(str(tmp_path / "kernels.py"))


def test_no_kernel_encloses_a_compiled_function() -> None:
    """Numba finds stored code by the enclosed variables, and a compiled function differs in each process."""
    enclosed = {
        kernel.function.__qualname__: [cell.cell_contents for cell in kernel.function.__closure__ or ()]
        for kernel in all_kernels()
    }
    assert not [name for name, values in enclosed.items() if any(isinstance(v, Dispatcher) for v in values)]
    assert len(enclosed) > 20
