"""Compiled code is stored where that is permitted and found by later starts. An unwritable cache is not an
error."""

import os
import shutil
import subprocess
import sys
import tempfile
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
USER_ID = 1000660000  # a user that does not exist
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
    """Clear results cached by other tests."""
    cache.can_be_written.cache_clear()
    yield
    cache.can_be_written.cache_clear()


def check(monkeypatch: pytest.MonkeyPatch, *bases: Path) -> list[Path]:
    """Check a kernel's result with these base directories. Return the files below the last one."""
    monkeypatch.setattr(cache, "_bases", list(bases))
    numbers = torch.zeros(3, dtype=torch.int64)
    Kernel(_set)(3, numbers.data_ptr())
    assert numbers.tolist() == [1, 1, 1]
    return files(bases[-1])


def files(base: Path) -> list[Path]:
    return sorted(base.glob("kernels-*/**/*.nbc"))


def test_code_is_stored_where_permitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = check(monkeypatch, NOWHERE, tmp_path / "kept")
    assert kept
    assert check(monkeypatch, NOWHERE, tmp_path / "kept") == kept, "compiled again"


def test_code_is_not_stored_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        for _ in range(2):
            check(monkeypatch, NOWHERE)
    records = [record for record in caplog.records if record.name == cache.__name__]
    assert len(records) == 1, "one line; slow compilations also log progress"


def test_compilation_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log line says how long the code is stored."""
    caplog.set_level("INFO", "tgis.shard.checkpoint.progress")
    monkeypatch.setattr(progress, "FIRST_COMPILING_S", 0.0)

    def log_lines(*bases: Path) -> list[str]:
        monkeypatch.setattr(compiler, "compile_progress", CompileProgress())
        caplog.clear()
        check(monkeypatch, *bases)
        lines = [text for text in caplog.messages if text.startswith("compiling")]
        return [line.partition(", and the code ")[2] for line in lines]

    kept = tmp_path / "kept"
    assert log_lines(kept) == [f"is stored in {kept} for later starts"]
    assert log_lines(kept) == []
    assert log_lines(NOWHERE) == ["cannot be stored, so every start compiles again"]
    monkeypatch.setattr(cache, "_run_directories", {tmp_path / "run"})
    assert log_lines(tmp_path / "run") == ["is stored for this run, so the next run compiles again"]


def test_a_full_disk_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", fail)
    assert not check(monkeypatch, tmp_path)


def test_code_that_came_with_the_package_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a directory that cannot be written."""
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


def test_the_run_stores_code_if_there_is_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_bases", [])
    cache.add_run_directory(Path("/proc/kernels"))  # without any space
    assert not cache._bases
    for _ in range(2):
        cache.add_run_directory(tmp_path / "kernels")
    assert cache._bases == [tmp_path / "kernels"]


def test_the_directory_of_a_users_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_user_directories", [Path("/home/caches")])
    monkeypatch.setattr(cache, "_bases", [cache._BESIDE_SOURCE, Path("/home/caches"), tmp_path / "run"])
    for unused in (None, "", "relative"):
        cache.use_cache_home(unused)
        assert cache.user_directories() == [Path("/home/caches")]
    cache.use_cache_home(str(tmp_path))
    assert cache.user_directories() == [tmp_path / "tgis"]
    assert cache._bases == [cache._BESIDE_SOURCE, tmp_path / "tgis", tmp_path / "run"]


def test_no_code_is_stored_where_others_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.can_be_written(tmp_path)
    cache.can_be_written.cache_clear()
    tmp_path.chmod(0o777)
    assert not cache.can_be_written(tmp_path)
    tmp_path.chmod(0o700)
    cache.can_be_written.cache_clear()
    monkeypatch.setattr(cache, "_owners", {os.geteuid() + 1})  # as another user
    assert not cache.can_be_written(tmp_path)
    assert not check(monkeypatch, tmp_path)
    monkeypatch.setattr(cache, "_BESIDE_SOURCE", tmp_path)
    cache.keep_beside_source()
    assert cache.can_be_written(tmp_path)


COMPILE = """
import sys
from pathlib import Path
from tgis.shard.kernels.cpu.jit import cache as code_cache
code_cache.use_cache_home(sys.argv[1] or None)
from tgis.shard.kernels.cpu.pointwise.elementwise import change
assert change.address
print(change._compiled.cache_hits, *code_cache._BESIDE_SOURCE.glob("kernels-*/**/*.nbc"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_packaged", [False, True])
def test_a_read_only_installation_of_another_user(is_packaged: bool) -> None:
    """Kernels are stored in the cache of the user who runs them. Packaged ones are not compiled."""
    with tempfile.TemporaryDirectory() as directory:
        installed, home = Path(directory) / "installed", Path(directory) / "caches"
        shutil.copytree(
            Path(cache.__file__).parents[4], installed / "tgis", ignore=shutil.ignore_patterns("__pycache__")
        )
        home.mkdir()
        Path(directory).chmod(0o755)

        def run(*drop: str) -> list[str]:
            env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), *filter(None, sys.path)])}
            command = [*drop, sys.executable, "-B", "-c", COMPILE, str(home)]
            done = subprocess.run(
                command, env=env, cwd=directory, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
            return done.stdout.split()

        if is_packaged:
            hits, *beside = run()
            assert (hits, len(beside)) == ("0", 1)
        subprocess.run(["chmod", "-R", "a-w", installed], check=True)
        drop = []
        if os.geteuid() == 0:
            os.chown(home, USER_ID, -1)
            drop = ["setpriv", f"--reuid={USER_ID}", "--clear-groups"]
        try:
            assert run(*drop)[0] == str(int(is_packaged))
            assert len(files(home / "tgis")) == 1
            assert run(*drop)[0] == "1"
        finally:
            subprocess.run(["chmod", "-R", "u+w", installed], check=True)


def test_a_user_without_a_home() -> None:
    """The user has no passwd entry."""
    command = [
        sys.executable,
        "-c",
        "from tgis.shard.kernels.cpu.jit import cache as code_cache; print(len(code_cache._bases))",
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env.pop("HOME", None)
    drop = ["setpriv", f"--reuid={USER_ID}", "--clear-groups"] if os.geteuid() == 0 else []
    done = subprocess.run([*drop, *command], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == ("1\n" if drop else "2\n"), done.stderr
