"""Machine code of Triton's kernels is read from the package and from the writable cache."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from tests.support.cuda.toy_kernels import copy, multiply
from tgis.shard.kernels.cpu.jit import cache
from tgis.shard.kernels.cuda import kernel_cache
from tgis.shard.kernels.cuda.offline.driver import compile_only

NOWHERE = Path("/proc/nowhere")


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    knobs = triton.knobs
    hooks = list(knobs.runtime.kernel_load_end_hook.calls)
    monkeypatch.setattr(kernel_cache, "user_directories", lambda: [tmp_path / "home"])
    monkeypatch.setattr(kernel_cache, "PACKAGED", tmp_path / "packaged")
    cache.can_be_written.cache_clear()
    with knobs.cache.scope(), knobs.runtime.scope(), knobs.nvidia.scope(), knobs.compilation.scope():
        yield
    knobs.runtime.kernel_load_end_hook.calls[:] = hooks
    cache.can_be_written.cache_clear()


def launch(capability: int = 90) -> list[bool]:
    """Launch a kernel like a new process would. Return whether its code was cached."""
    result: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: result.append(cache_hit)
    x = torch.empty(64, dtype=torch.bfloat16, device="meta")
    with compile_only(capability):
        triton.jit(copy)[1,](x, x, 64, BLOCK=64)
    return result


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.rglob("*") if path.is_file()}


def test_code_is_stored_in_the_user_s_directory(tmp_path: Path) -> None:
    kernel_cache.use_cache(tmp_path / "run")
    assert (launch(), launch()) == ([False], [True])
    assert "copy.cubin" in files(tmp_path / "home/triton")
    assert not (tmp_path / "run").exists()


def test_code_is_stored_for_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "user_directories", lambda: [NOWHERE])
    kernel_cache.use_cache(tmp_path / "run")
    assert launch() == [False]
    assert "copy.cubin" in files(tmp_path / "run/triton")


def test_code_is_stored_in_a_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "user_directories", lambda: [NOWHERE])
    kernel_cache.use_cache(None)
    assert (launch(), launch()) == ([False], [True])
    shutil.rmtree(triton.knobs.cache.dir)


def test_packaged_code_is_used_wherever_it_was_moved(tmp_path: Path) -> None:
    kernel_cache.use_cache(None)
    launch()
    (tmp_path / "home/triton").rename(tmp_path / "packaged")
    assert launch() == [True]
    assert launch(capability=80) == [False], "it is not packaged"
    assert launch(capability=80) == [True]
    kept = [path for path in (tmp_path / "home/triton").iterdir() if files(path)]
    assert len(kept) == 1


def test_a_package_that_cannot_be_written_is_used(tmp_path: Path) -> None:
    kernel_cache.use_cache(None)
    launch()
    (tmp_path / "home/triton").rename(tmp_path / "packaged")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "packaged").rglob("*")}
    assert launch() == [True]
    assert launch(capability=80) == [False]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "packaged").rglob("*")} == before


def test_compilation_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_cache.use_cache(None)
    seen: list[bool] = []

    def look(*_: Any, **__: Any) -> None:
        seen.append(kernel_cache.is_compiling())

    triton.knobs.runtime.kernel_load_start_hook.add(look)
    try:
        assert not kernel_cache.is_compiling()
        triton.knobs.compilation.listener = look
        x = torch.empty(64, dtype=torch.bfloat16, device="meta")
        kernel = triton.jit(copy)
        with compile_only(90):
            kernel[1,](x, x, 64, BLOCK=64)
            assert seen == [True, True], "compiled and loaded"
            assert not kernel_cache.is_compiling()
            kernel[1,](x, x, 64, BLOCK=64)
            assert len(seen) == 2, "compiled once"
            kernel.warmup(x, x, 32, BLOCK=32, grid=(1,))
            assert not kernel_cache.is_compiling(), "warmed up, not loaded"
    finally:
        triton.knobs.runtime.kernel_load_start_hook.remove(look)


def test_a_failed_compilation_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_cache.use_cache(None)
    x = torch.empty(64, 64, device="meta")
    with compile_only(90), pytest.raises(triton.CompilationError):
        triton.jit(multiply)[1,](x, x, x, 64, 64, 63)  # not a power of two
    assert kernel_cache.is_compiling(), "the compilation has not expired yet"
    monkeypatch.setattr(kernel_cache, "MAX_COMPILE_S", 0.0)
    assert not kernel_cache.is_compiling()
    monkeypatch.undo()
    kernel_cache._end()
