"""The image's files besides its base, as made by scripts/image_root.sh."""

import os
import shutil
import stat
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from scripts.check_locks import CPU, SERVICE, read_lock

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
UNNEEDED = ("pip", "gcc", "cc", "c++", "curl", "wget", "conda", "uv")


@pytest.fixture(scope="module")
def root() -> Path:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root, and unshare, to make a directory of the image's layers")
    root = Path("build/image-root")
    subprocess.run(["scripts/image_root.sh", str(root), sys.executable], check=True, timeout=400)
    return root.absolute()


def test_it_is_installed_and_not_linked(root: Path) -> None:
    [package] = root.glob("opt/tgis/lib/python3*/site-packages/tgis")
    for each in (package, package.with_name("tgis_client")):
        assert (each / "pb/generation_pb2.py").is_file()
    assert str(Path.cwd()).encode() not in b"".join(
        path.read_bytes() for path in package.parent.glob("*.pth")
    )
    for script in ("text-generation-launcher", "text-generation-server", "health-probe", "tgis"):
        assert (root / "opt/tgis/bin" / script).read_text().startswith("#!/opt/tgis/bin/python")


def test_the_locks_have_all_that_is_in_it(root: Path) -> None:
    """The packages are exactly those of the lock, in the same versions."""
    [packages] = root.glob("opt/tgis/lib/python3*/site-packages")
    installed = {canonicalize_name(one.name): one.version for one in distributions(path=[str(packages)])}
    locked = [
        entry for name in (SERVICE, CPU) for entry in read_lock((ROOT / f"locks/{name}.lock").read_text())
    ]
    del installed["tgis-next"], installed["tgis-next-client"]
    assert installed == {entry.name: entry.version for entry in locked if entry.applies({})}


def test_nothing_is_in_it_that_builds_or_fetches(root: Path) -> None:
    programs = {path.name for path in (root / "opt/tgis/bin").iterdir()}
    assert "python" in programs
    assert programs.isdisjoint(UNNEEDED)
    assert not [*root.glob("opt/tgis/lib/python3*/site-packages/pip")]


def test_kernels_are_in_it(root: Path) -> None:
    [package] = root.glob("opt/tgis/lib/python3*/site-packages/tgis")
    files = [*package.glob("shard/kernels/cpu/jit/__pycache__/kernels-*/**/*.nbc")]
    assert len(files) >= 25


def test_any_user_may_write_in_two_places(root: Path) -> None:
    """Group 0 can write there, and read everything else."""
    writable, hidden = set(), set()
    for directory, _, files in os.walk(root):
        for path in (directory, *(os.path.join(directory, name) for name in files)):
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                continue
            for_all = status.st_mode | status.st_mode >> 3 if status.st_gid == 0 else status.st_mode
            if for_all & stat.S_IWOTH:
                writable.add(path)
            if not for_all & stat.S_IROTH:
                hidden.add(path)
    assert writable == {f"{root}/tmp", f"{root}/home/tgis"}
    assert not hidden
