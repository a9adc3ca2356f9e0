"""Contents of the pack for a bare machine: its wheels are those that the machine lacks, names of compiled
kernels are the machine's, and a package that is in neither is noticed."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import triton
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from triton.runtime.cache import triton_key

from bench.gpu.pack import install
from bench.gpu.pack.kernels import compute_key
from bench.gpu.pack.wheels import SERVICE_LOCK, TRITON_LOCK, VERSIONED, list_names, read_lock, read_machine

# Benches are no part of the service: make test-all runs their tests.
pytestmark = pytest.mark.slow


@pytest.mark.slow
def test_names_of_kernels_are_those_of_the_package() -> None:
    """The names are those that Triton itself computes, for the installed version."""
    assert compute_key(Path(triton.__file__).parent) == triton_key()


def test_the_pack_has_what_the_gpu_machine_lacks() -> None:
    names = set(list_names())
    assert {"llguidance", "grpcio-health-checking", "grpcio-reflection", "starlette", "uvicorn"} <= names
    assert names & read_machine() == VERSIONED
    assert not names & {"colorama", "torch", "numpy", "transformers"}


def test_locks_are_read_as_pip_reads_them() -> None:
    lines = [line.split(" \\")[0] for line in SERVICE_LOCK.read_text().splitlines() if "==" in line]
    known = [Requirement(line) for line in lines if not line.startswith(("#", " "))]
    linux = {"sys_platform": "linux", "platform_machine": "x86_64", "python_full_version": "3.12.3"}
    here = {canonicalize_name(each.name) for each in known if not each.marker or each.marker.evaluate(linux)}
    assert set(read_lock(SERVICE_LOCK)) == here
    assert all("--hash=sha256:" in text for text in read_lock(SERVICE_LOCK).values())
    assert read_lock(TRITON_LOCK)["triton"].count("--hash=") == 2


def test_names_of_the_machine_are_names_of_packages() -> None:
    assert all(canonicalize_name(name) == name for name in read_machine())
    assert {"torch", "triton", "transformers"} <= read_machine()


def run_gate(*names: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "bench.gpu.pack.gate", *names]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_everything_can_be_imported_with_the_pack() -> None:
    done = run_gate()
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["llguidance"])
def test_a_package_that_is_missing_is_noticed(missing: str) -> None:
    done = run_gate(*(name for name in list_names() if name != missing))
    assert done.returncode == 1
    assert f"is of {missing}, which the machine lacks" in done.stderr


@pytest.mark.slow
def test_a_pack_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A wheel for another machine, and a path that cannot be written, do not affect the rest of the pack."""
    pack, prefix, root = (tmp_path / name for name in ("pack", "prefix", "root"))
    for name in ("wheels", "pb", "triton/KEY"):
        (pack / name).mkdir(parents=True)
    write_wheel(pack / "wheels" / "toy-1.0-py3-none-any.whl")
    write_wheel(pack / "wheels" / "toy-1.0-cp27-cp27m-win32.whl")
    (pack / "pb" / "shard_pb2.py").write_text("")
    (pack / "triton" / "KEY" / "norm.cubin").write_bytes(b"code")
    root.write_text("no directory")
    monkeypatch.setattr(install, "ROOT", root)
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr(sys, "argv", ["install", str(pack)])
    install.main()
    assert (pack / "site" / "toy.py").exists()
    assert (prefix / "triton" / "KEY" / "norm.cubin").read_bytes() == b"code"
    errors = capfd.readouterr().err
    assert "toy-1.0-cp27-cp27m-win32.whl is not installed" in errors
    assert "pb is not installed" in errors
    root.unlink()
    install.main()
    assert (root / "tgis" / "pb" / "shard_pb2.py").exists()


def write_wheel(path: Path) -> None:
    about = "toy-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("toy.py", "NAME = 'toy'\n")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        tag = path.stem.removeprefix("toy-1.0-")
        wheel.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{about}/RECORD", "")


def test_without_a_pack_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["install", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit, match="make gpu-pack makes one"):
        install.main()
