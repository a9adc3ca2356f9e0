"""`python -m bench.gpu.pack DIRECTORY`: create the pack of wheels, generated code, and compiled kernels, less
than 50 MiB in total. This needs a package index, and no GPU."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from bench.gpu.pack.install import GENERATED
from bench.gpu.pack.wheels import ROOT, TRITON_LOCK, download, list_names, read_lock

MAX_BYTES = 50 << 20


def main() -> None:
    directory = Path(sys.argv[1])
    fresh = directory.with_name(f"{directory.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    wheels = fresh / "wheels"
    download(list_names(), ROOT / "locks" / "service.lock", wheels)
    for name, path in GENERATED.items():
        shutil.copytree(ROOT / path, fresh / name, ignore=shutil.ignore_patterns("__pycache__"))
    compile_kernels(fresh / "triton")
    num_bytes = sum(path.stat().st_size for path in fresh.rglob("*") if path.is_file())
    if num_bytes > MAX_BYTES:
        sys.exit(f"the pack has {num_bytes >> 20} MiB, at most {MAX_BYTES >> 20}")
    num_wheels = len(list(wheels.iterdir()))
    shutil.rmtree(directory, ignore_errors=True)
    fresh.rename(directory)
    print(f"{directory}: {num_wheels} wheels, {num_bytes / 2**20:.0f} MiB")


def compile_kernels(directory: Path) -> None:
    """Compile with the machine's version of Triton, for the Python that runs this."""
    with tempfile.TemporaryDirectory() as name:
        own, machine = Path(name) / "own", Path(name) / "machine"
        requirements = Path(name) / "triton.txt"
        requirements.write_text(read_lock(TRITON_LOCK)["triton"] + "\n")
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
        install += ["--require-hashes", "--target", str(own), "-r", str(requirements)]
        subprocess.run(install, check=True)
        download(["triton"], TRITON_LOCK, machine)
        [wheel] = machine.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(machine)
        command = [sys.executable, "-m", "bench.gpu.pack.kernels", str(directory), str(machine / "triton")]
        path = os.pathsep.join(filter(None, [str(own), os.environ.get("PYTHONPATH")]))
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})


if __name__ == "__main__":
    main()
