"""Compiled code of one directory is found by another only under numba's own names."""

from pathlib import Path

from numba.core.caching import _CacheLocator

from tgis.shard.kernels.cpu.jit.precompile import _numba_name


def test_directories_have_the_names_that_numba_gives_them(tmp_path: Path) -> None:
    assert _numba_name(tmp_path) == _CacheLocator.get_suitable_cache_subpath(str(tmp_path / "kernels.py"))
