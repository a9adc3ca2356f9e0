"""Compiled code is found again where it may be kept, and not being able to keep it is no error."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray

from tgis.shard.checkpoint import progress
from tgis.shard.checkpoint.progress import CompileProgress
from tgis.shard.kernels.cpu.gemm import inner_loop
from tgis.shard.kernels.cpu.jit import cache, compiler
from tgis.shard.kernels.cpu.jit.compiler import Kernel, next_unit, pointer

NOWHERE = Path("/proc/nowhere")
_I64 = np.int64(0)


def _set(args: Any) -> None:
    a = carray(args, 3)
    numbers = carray(pointer(a[2], _I64), (a[1],))
    unit = next_unit(args)
    while unit < a[1]:
        numbers[unit] = 1
        unit = next_unit(args)


@pytest.fixture(autouse=True)
def no_memory() -> Iterator[None]:
    """Of what could be written in other tests."""
    cache.can_be_written.cache_clear()
    yield
    cache.can_be_written.cache_clear()


def check(monkeypatch: pytest.MonkeyPatch, *bases: Path) -> list[Path]:
    """A kernel gives the right numbers when code may be kept there; the files below the last base."""
    monkeypatch.setattr(cache, "_bases", list(bases))
    numbers = torch.zeros(3, dtype=torch.int64)
    Kernel(_set)(3, numbers.data_ptr())
    assert numbers.tolist() == [1, 1, 1]
    return files(bases[-1])


def files(base: Path) -> list[Path]:
    return sorted(base.glob("kernels-*/**/*.nbc"))


def test_code_is_kept_where_it_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = check(monkeypatch, NOWHERE, tmp_path / "kept")
    assert kept
    assert check(monkeypatch, NOWHERE, tmp_path / "kept") == kept, "compiled again"


def test_code_is_not_kept_where_it_may_not_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        for _ in range(2):
            check(monkeypatch, NOWHERE)
    told = [record for record in caplog.records if record.name == cache.__name__]
    assert len(told) == 1, "it is said once; progress of compiling is told besides where that is slow"


def test_compiling_is_told_where_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With how long the code lasts."""
    caplog.set_level("INFO", "tgis.shard.checkpoint.progress")
    monkeypatch.setattr(progress, "FIRST_COMPILING_S", 0.0)

    def told(*bases: Path) -> list[str]:
        monkeypatch.setattr(compiler, "compile_progress", CompileProgress())
        caplog.clear()
        check(monkeypatch, *bases)
        return [text.partition("; the code ")[2] for text in caplog.messages if text.startswith("compiling")]

    kept = tmp_path / "kept"
    assert told(kept) == [f"is kept in {kept}, where later starts find it"]
    assert told(kept) == []
    assert told(NOWHERE) == ["cannot be kept, so that every start compiles"]
    monkeypatch.setattr(cache, "_run_directories", {tmp_path / "run"})
    assert told(tmp_path / "run") == ["is kept for this run, so that the next one compiles again"]


def test_a_full_disk_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", fail)
    assert not check(monkeypatch, tmp_path)


def test_code_that_came_with_the_package_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it cannot be written."""
    packaged = tmp_path / "packaged"
    names = [file.relative_to(packaged) for file in check(monkeypatch, packaged)]
    monkeypatch.setattr(cache, "_BESIDE_SOURCE", packaged)
    monkeypatch.setattr(cache, "can_be_written", lambda base: base != packaged and not base.mkdir())
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", pytest.fail)
    kept = check(monkeypatch, packaged, tmp_path / "kept")
    assert [file.relative_to(tmp_path / "kept") for file in kept] == names


def test_sources_of_a_kernel_include_modules_that_are_imported_whole() -> None:
    sources = {Path(source).name for source in cache._sources(str(inner_loop.__file__))}
    assert {"inner_loop.py", "panels.py", "llvm.py", "compiler.py"} <= sources


def test_the_run_keeps_code_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_bases", [])
    cache.add_run_directory(Path("/proc/kernels"))  # which has no room at all
    assert not cache._bases
    for _ in range(2):
        cache.add_run_directory(tmp_path / "kernels")
    assert cache._bases == [tmp_path / "kernels"]


def test_a_user_without_a_home() -> None:
    """Whom no list of users knows."""
    command = [
        sys.executable,
        "-c",
        "from tgis.shard.kernels.cpu.jit import cache as code_cache; print(len(code_cache._bases))",
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env.pop("HOME", None)
    drop = ["setpriv", "--reuid=1000660000", "--clear-groups"] if os.geteuid() == 0 else []
    done = subprocess.run([*drop, *command], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == ("1\n" if drop else "2\n"), done.stderr
