"""Whether a lock that does not hold what the project needs is found out."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts.check_locks import LockError, Needs, faults, read_lock, read_project

PROJECT = read_project(
    """
[build-system]
requires = ["builder>=1"]
[project]
classifiers = ["Programming Language :: Python :: 3.11", "Programming Language :: Python :: 3.12"]
dependencies = ["torch>=2.11", "first_one>=1", "tgis-next-client", "newer; python_version >= '3.12'"]
[project.optional-dependencies]
image = ["tgis-next[more]"]
more = ["second[fast]"]
dev = ["unlocked"]
""",
    """
[project]
dependencies = ["below>=2; platform_machine == 'aarch64'"]
""",
    "# a comment\ntorch==2.13.0\nunlocked==1\n",
)
HASH = f"--hash=sha256:{64 * 'a'}"
LOCKS = {
    "service": f"""# written by a tool
first-one==1.2 \\
    {HASH} \\
    {HASH}
    # via tgis-next
below==3 ; platform_machine == 'aarch64' \\
    {HASH}
elsewhere==1 ; sys_platform == 'win32' {HASH}
newer==1 {HASH}
second==2 {HASH}
speed==5 {HASH}
""",
    "torch-cpu": f"torch==2.13.0+cpu {HASH}\n",
    "torch-cuda": f"torch==2.13.0 {HASH}\nlibrary==13 {HASH}\n",
    "build": f"builder==1.5 {HASH}\n",
    "install": f"installer==7 {HASH}\n",
}
INSTALLED: Needs = {
    "torch": ("2.13.0+cpu", []),
    "first-one": ("1.2", ["below>=2; platform_machine == 'aarch64'", "elsewhere; sys_platform == 'win32'"]),
    "below": ("3", ["first-one"]),
    "newer": ("1", []),
    "second": ("2", ["speed; extra == 'fast'", "nobody; extra == 'slow'"]),
    "speed": ("5", []),
}
BROKEN = [
    ("service", "first-one==1.2", "other-one==1.2", "the project needs first_one>=1, which no lock has"),
    ("service", "first-one==1.2", "first-one==0.9", "the project needs first_one>=1, the lock has 0.9"),
    ("service", "first-one==1.2", "first-one==1.3", "the lock has first-one 1.3, the installed one is 1.2"),
    ("service", "first-one==1.2", "first-one>=1.2", "first-one is not pinned to one version"),
    ("service", "newer==1", "newer==1 ; python_version < '3.12'", "the project needs newer; python_version"),
    ("service", "'aarch64'", "'x86_64'", "first-one needs below>=2"),
    ("service", "below==3", "below==1", "first-one needs below>=2"),
    ("service", "below==3", "below==1", "tgis-next-client needs below>=2"),
    ("service", f"speed==5 {HASH}\n", "", "second needs speed"),
    ("service", "speed==5", f"surplus==1 {HASH}\nspeed==5", "surplus is in the lock, and nothing needs it"),
    ("service", f"second==2 {HASH}", "second==2", "locks/service.lock: second has no hashes"),
    ("torch-cpu", "2.13.0", "2.14.0", "constraints.txt says torch==2.13.0, the lock has 2.14.0+cpu"),
    ("torch-cuda", "2.13.0", "2.14.0", "constraints.txt says torch==2.13.0, the lock has 2.14.0"),
    ("torch-cuda", 64 * "a", 63 * "a", "locks/torch-cuda.lock: torch has no hashes"),
    ("build", "1.5", "0.5", "build-system needs builder>=1"),
]


def list_faults(locks: Mapping[str, str], installed: Needs = INSTALLED) -> list[str]:
    return list(faults(PROJECT, {name: read_lock(text) for name, text in locks.items()}, installed))


def test_a_lock_that_holds_all() -> None:
    assert list_faults(LOCKS) == []


@pytest.mark.parametrize(("name", "ours", "broken", "fault"), BROKEN)
def test_missing_lock_entries_are_reported(name: str, ours: str, broken: str, fault: str) -> None:
    assert ours in LOCKS[name]
    assert any(fault in each for each in list_faults({**LOCKS, name: LOCKS[name].replace(ours, broken)}))


def test_packages_that_are_not_installed_are_unknown() -> None:
    rest = {name: each for name, each in INSTALLED.items() if name != "second"}
    fault = "the lock has second 2, the installed one is not there: make install"
    assert list_faults(LOCKS, rest) == [fault], "and speed is not said to be needless"


@pytest.mark.parametrize(
    "line", ["--index-url https://example.com", "-e .", "./one.whl", "one @ https://example.com/one.whl"]
)
def test_a_lock_names_no_place(line: str) -> None:
    with pytest.raises(LockError):
        read_lock(f"{LOCKS['service']}{line}\n")


def test_the_client_has_the_version_of_the_service() -> None:
    service, client = (
        tomllib.loads(Path(name).read_text())["project"]
        for name in ("pyproject.toml", "client/pyproject.toml")
    )
    assert client["version"] == service["version"]
    assert f"tgis-next-client=={client['version']}" in service["dependencies"]


def test_the_locks_name_none() -> None:
    """What this machine's settings say of indexes is in none of them."""
    for path in Path("locks").glob("*.lock"):
        assert read_lock(path.read_text())
