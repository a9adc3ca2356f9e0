"""Downloads the wheels of the pack: the packages of the service's lock that the machine lacks, for the
machine's Python."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
ROOT = HERE.parent.parent
MACHINE_PACKAGES = HERE / "machine_packages.txt"
SERVICE_LOCK, TRITON_LOCK = ROOT / "locks" / "service.lock", HERE / "triton.lock"
PYTHON_VERSION = "3.12"
# pip matches each exactly.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 26, 27, 28, 31, 34)]
PLATFORMS += ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"]
# Generated code refuses older versions than its generator's, and pydantic needs new names.
VERSIONED = frozenset({"grpcio", "protobuf", "typing-extensions"})

_ENTRY = re.compile(r"^([a-z0-9][a-z0-9._-]*)==(\S+)((?: ;[^\\\n]*)?)((?: \\\n +--hash=\S+)+)", re.MULTILINE)
_NOT_HERE = re.compile(r"sys_platform == '(win32|darwin|emscripten)'|(?<!not )sys_platform == 'emscripten'")


def read_machine() -> frozenset[str]:
    """Return the names of the machine's packages."""
    lines = MACHINE_PACKAGES.read_text().splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def list_names() -> list[str]:
    """Return the packages of the pack."""
    machine = read_machine() - VERSIONED
    return [name for name in read_lock(SERVICE_LOCK) if name not in machine]


def read_lock(path: Path) -> dict[str, str]:
    """Return the requirements of a lock with their hashes, by name, without those of other systems."""
    requirements = {}
    for match in _ENTRY.finditer(path.read_text()):
        name, _, marker, _ = match.groups()
        if not _NOT_HERE.search(marker):
            requirements[name] = match[0]
    return requirements


def download(names: Iterable[str], lock: Path, directory: Path) -> None:
    """Download wheels for the machine's Python that have the hashes of the lock."""
    requirements = read_lock(lock)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "--python-version", PYTHON_VERSION, "--implementation", "cp"]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements[name] for name in names) + "\n")
        file.flush()
        subprocess.run([*command, "-d", str(directory), "-r", file.name], check=True)
