"""Precompiled kernels are those that a shard asks for."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton
from triton.backends.nvidia import driver as nvidia

from tests.support.cuda import golden
from tgis.shard.kernels.cuda import jit, precompile
from tgis.shard.kernels.cuda.offline import compile_only

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# In a process of its own, because worker processes import its main module.
COMMAND = """
import sys
from pathlib import Path
from tgis.shard.kernels.cuda import jit, precompile

jit.PACKAGED = precompile.PACKAGED = Path(sys.argv.pop(1))
if __name__ == "__main__":
    precompile.main()
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("Triton's modules are built with gcc, which is not installed")
    directory = tmp_path_factory.mktemp("precompiled")
    script, made = directory / "command.py", directory / "made"
    script.write_text(COMMAND)
    command = [sys.executable, str(script), str(made), "90"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    assert line.startswith("compiled "), line
    return made.rename(directory / "moved")


@pytest.fixture
def settings(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(jit, "user_directories", lambda: [tmp_path])
    monkeypatch.setattr(jit, "PACKAGED", package)
    hooks, knobs = list(triton.knobs.runtime.kernel_load_end_hook.calls), triton.knobs
    with knobs.cache.scope(), knobs.runtime.scope(), knobs.nvidia.scope(), knobs.compilation.scope():
        jit.use_cache(None)
        yield
    triton.knobs.runtime.kernel_load_end_hook.calls[:] = hooks


@pytest.mark.usefixtures("settings")
def test_nothing_is_compiled_again() -> None:
    compiled: list[str] = []
    found: list[str] = []

    def listen(*, src: object, cache_hit: bool, **_: object) -> None:
        (found if cache_hit else compiled).append(src.name)  # type: ignore[attr-defined]

    triton.knobs.compilation.listener = listen
    with compile_only(90):
        for variant in golden.of_models(*golden.MODELS):
            variant.run()
    assert compiled == []
    assert len(found) > 20


def test_modules_in_c_are_packaged(package: Path) -> None:
    """With Triton before 3.7, there is one for each list of types of arguments too."""
    modules = [path.name.partition(".")[0] for path in package.rglob("*.so")]
    assert modules.count("cuda_utils") == 1
    assert ("__triton_launcher" in modules) == hasattr(nvidia, "make_launcher")


def test_only_what_runs_is_packaged(package: Path) -> None:
    assert {path.suffix for path in package.rglob("*") if path.is_file()} == {
        ".cubin",
        ".json",
        ".so",
        ".source",
    }


@pytest.mark.parametrize("words", [[], ["75"], ["90", "90a"]])
def test_words_that_are_no_capability_are_refused(words: list[str]) -> None:
    command = [sys.executable, "-m", precompile.__name__, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("usage: ")
