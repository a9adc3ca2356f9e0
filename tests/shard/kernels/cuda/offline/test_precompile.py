"""A shard uses the precompiled kernels."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton
from triton.backends.nvidia import driver as nvidia

from scripts.check_locks import ROOT
from tests.support.cuda import golden
from tgis.shard.kernels.cuda import kernel_cache
from tgis.shard.kernels.cuda.offline import precompile, variants
from tgis.shard.kernels.cuda.offline.driver import MAX_SHARED_BYTES, compile_only

pytestmark = pytest.mark.timeout(1200)
slow = pytest.mark.slow
# In a separate process, because worker processes import its main module.
COMMAND = """
import dataclasses, sys
from pathlib import Path
from tgis.shard.kernels.cuda import kernel_cache
from tgis.shard.kernels.cuda.offline import precompile, variants

kernel_cache.PACKAGED = precompile.PACKAGED = Path(sys.argv.pop(1))
variants.MODELS = (dataclasses.replace(variants.MODELS[0], shards=(1,)),)
variants.DTYPES = variants.DTYPES[:1]
if __name__ == "__main__":
    precompile.main()
"""
# A machine with a driver and without a C compiler loads an unknown model.
USE = """
import ctypes, sys
from pathlib import Path
from triton.backends.nvidia import driver
from tgis.shard.kernels.cuda import kernel_cache
from tgis.shard.kernels.cuda.offline import precompile, variants
from tgis.shard.kernels.cuda.offline.driver import compile_only

package, libcuda, home = map(Path, sys.argv[1:])
ctypes.CDLL(str(libcuda), ctypes.RTLD_GLOBAL)
kernel_cache.PACKAGED, kernel_cache.user_directories = package, lambda: [home]
kernel_cache.use_cache(None)
assert kernel_cache.knobs.nvidia.libcuda_path == str(libcuda.parent)
driver.CudaUtils()
variants.MODELS = (variants.ModelShape("other", 640, 1000, 10, 5, 64, 1000),)
with compile_only(90, precompile._make_launcher) as kernels:
    for variant in variants.find_variants():
        variant.run()
print(len(kernels))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("Triton's modules are built with gcc, which is not installed")
    directory = tmp_path_factory.mktemp("precompiled")
    script, made = directory / "command.py", directory / "made"
    script.write_text(COMMAND)
    command = [sys.executable, str(script), str(made), "90"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, check=False)
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    assert line.startswith("compiled "), line
    return made.rename(directory / "moved")


@pytest.fixture
def settings(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernel_cache, "user_directories", lambda: [tmp_path])
    monkeypatch.setattr(kernel_cache, "PACKAGED", package)
    hooks, knobs = list(triton.knobs.runtime.kernel_load_end_hook.calls), triton.knobs
    with knobs.cache.scope(), knobs.runtime.scope(), knobs.nvidia.scope(), knobs.compilation.scope():
        kernel_cache.use_cache(None)
        yield
    triton.knobs.runtime.kernel_load_end_hook.calls[:] = hooks


@slow
@pytest.mark.usefixtures("settings")
def test_nothing_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "DTYPES", variants.DTYPES[:1])  # as in the command
    compiled: list[str] = []
    actual: list[str] = []

    def listen(*, src: object, cache_hit: bool, **_: object) -> None:
        (actual if cache_hit else compiled).append(src.name)  # type: ignore[attr-defined]

    triton.knobs.compilation.listener = listen
    with compile_only(90):
        known = golden.of_models("all", "llama-3.1-8b/1")
        for variant in known[::-1] + variants.find_check_variants():
            variant.run()
    assert compiled == []
    assert len(actual) > 10


@slow
def test_modules_in_c_are_packaged(package: Path) -> None:
    """With Triton before 3.7, there is also one for each list of argument types."""
    modules = [path.name.partition(".")[0] for path in package.rglob("*.so")]
    assert modules.count("cuda_utils") == 1
    assert ("__triton_launcher" in modules) == hasattr(nvidia, "make_launcher")


@slow
def test_only_executed_kernels_are_packaged(package: Path) -> None:
    assert {path.suffix for path in package.rglob("*") if path.is_file()} == {
        ".cubin",
        ".json",
        ".so",
        ".source",
    }


@pytest.mark.parametrize("words", [[], ["75"], ["90", "90a"]])
def test_invalid_capabilities_are_refused(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["precompile", *words])
    with pytest.raises(SystemExit, match="usage: precompile CAPABILITY"):
        precompile.main()


@slow
def test_a_machine_without_a_c_compiler_runs_any_model(package: Path, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    libcuda = tmp_path / "lib/libcuda.so.1"
    precompile._build_stub(libcuda)
    command = [sys.executable, "-c", USE, str(package), str(libcuda), str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={"PATH": "/nonexistent"}
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


def test_the_image_precompiles_for_gpus_that_are_known() -> None:
    command = re.search(r"-m (tgis\S+cuda\S+) ([\d ]+)\n", (ROOT / "deployment/build.sh").read_text())
    assert command
    assert command[1] == precompile.__name__
    assert {int(word) for word in command[2].split()} <= set(MAX_SHARED_BYTES)
