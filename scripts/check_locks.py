"""Checks locks/ against pyproject.toml, constraints.txt and the requirements of the installed packages,
without a package index.

torch's build for CUDA needs packages that are not installed, so only the format and torch's version are
checked in its lock."""

import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
SERVICE, CPU, CUDA, BUILD, INSTALL = "service", "torch-cpu", "torch-cuda", "build", "install"
EXTRA = "image"
HASH = "--hash=sha256:"
# Platforms of the service, with each Python of pyproject.toml's classifiers.
MACHINES = ("x86_64", "aarch64")

Environment = dict[str, str]
Needs = Mapping[str, tuple[str, list[str]]]
"""Version and requirements of each installed package, by name."""


class LockError(Exception):
    """Error for a lock with a line that is not allowed."""


@dataclass(frozen=True)
class Entry:
    requirement: Requirement
    hashes: tuple[str, ...]

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    @property
    def version(self) -> str:
        """Version that the lock pins; empty if it pins none."""
        [*pins] = self.requirement.specifier
        return (
            pins[0].version
            if len(pins) == 1 and pins[0].operator == "==" and "*" not in pins[0].version
            else ""
        )

    def applies(self, environment: Environment) -> bool:
        return _applies(self.requirement, environment)


Lock = list[Entry]


class Project(NamedTuple):
    """Requirements of both distributions' pyproject.toml and of constraints.txt."""

    dependencies: list[str]
    client_dependencies: list[str]
    extras: Mapping[str, list[str]]
    builders: list[str]
    pythons: list[str]
    constraints: list[str]


def read_lock(text: str) -> Lock:
    """Parse a lock. Raises LockError for a line that is not a requirement, such as an index, a path or a
    URL."""
    entries = []
    for line in text.replace("\\\n", " ").splitlines():
        words, _, _ = line.partition("#")
        if words.strip():
            requirement, *hashes = words.split(HASH)
            entries.append(Entry(_requirement(requirement), tuple(each.strip() for each in hashes)))
    return entries


def _requirement(text: str) -> Requirement:
    try:
        requirement = Requirement(text.strip())
    except InvalidRequirement as error:
        raise LockError(f"{text.strip()!r} is no requirement") from error
    if requirement.url:
        raise LockError(f"{requirement.name} comes from {requirement.url}, not from an index")
    return requirement


def environments(pythons: Iterable[str]) -> list[Environment]:
    return [
        {
            "python_version": python,
            "python_full_version": f"{python}.0",
            "platform_machine": machine,
            "sys_platform": "linux",
            "platform_system": "Linux",
            "os_name": "posix",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
        }
        for python in pythons
        for machine in MACHINES
    ]


def faults(project: Project, locks: Mapping[str, Lock], installed: Needs) -> Iterator[str]:
    """Yield the errors, one line each."""
    if of_form := [fault for name, lock in locks.items() for fault in _faults_of_form(name, lock)]:
        yield from of_form
        return
    places = environments(project.pythons)
    served = [*locks[SERVICE], *locks[CPU]]
    roots = [*project.dependencies, *project.extras[EXTRA]]
    errors: dict[str, None] = {}  # each error once, although most occur on every platform
    needed: set[str] = set()
    for place in places:
        walk = _Walk(project, served, installed, place)
        errors |= dict.fromkeys(walk.faults("the project", roots))
        needed |= walk.seen
    yield from errors or (  # otherwise not all requirements are known
        f"{entry.name} is in the lock, and nothing needs it: run make lock"
        for entry in served
        if entry.name not in needed and any(map(entry.applies, places))
    )
    yield from _faults_of_builders(project, locks[BUILD], places)
    yield from _faults_of_constraints(project, [entry for lock in locks.values() for entry in lock])


def _faults_of_form(name: str, lock: Lock) -> Iterator[str]:
    for entry in lock:
        if not entry.version:
            yield f"locks/{name}.lock: {entry.name} is not pinned to one version"
        if not entry.hashes or any(len(each) != 64 for each in entry.hashes):
            yield f"locks/{name}.lock: {entry.name} has no hashes of SHA-256"


def _faults_of_builders(project: Project, lock: Lock, places: Iterable[Environment]) -> Iterator[str]:
    for text in project.builders:
        needed = Requirement(text)
        if not any(_serves(entry, needed) for entry in lock):
            yield f"build-system needs {needed}, which locks/{BUILD}.lock does not have: run make lock"


def _faults_of_constraints(project: Project, entries: Lock) -> Iterator[str]:
    for text in project.constraints:
        constraint = Requirement(text)
        for entry in entries:
            if entry.name == canonicalize_name(constraint.name) and not _serves(entry, constraint):
                yield f"constraints.txt says {constraint}, the lock has {entry.version}: run make lock"


class _Walk:
    """Return the transitive requirements of the project on one platform, according to the installed
    packages."""

    def __init__(self, project: Project, lock: Lock, installed: Needs, place: Environment) -> None:
        self._project, self._installed, self._place = project, installed, place
        self._entries = {entry.name: entry for entry in lock if entry.applies(place)}
        self._asked: set[tuple[str, str]] = set()
        self.seen: set[str] = set()

    def faults(self, who: str, needs: Iterable[str], extra: str = "") -> Iterator[str]:
        for needed in map(Requirement, needs):
            if not _applies(needed, {**self._place, "extra": extra}):
                continue
            if needed.name == "tgis-next":
                for wanted in needed.extras:
                    yield from self.faults(who, self._project.extras[wanted])
            elif needed.name == "tgis-next-client":
                yield from self.faults(needed.name, self._project.client_dependencies)
            elif (entry := self._entries.get(canonicalize_name(needed.name))) is None:
                yield f"{who} needs {needed}, which no lock has: run make lock"
            elif not _serves(entry, needed):
                yield f"{who} needs {needed}, the lock has {entry.version}: run make lock"
            else:
                yield from self._faults_below(entry, needed)

    def _faults_below(self, entry: Entry, needed: Requirement) -> Iterator[str]:
        for extra in ("", *needed.extras):
            if (entry.name, extra) in self._asked:
                continue
            self._asked.add((entry.name, extra))
            self.seen.add(entry.name)
            version, needs = self._installed.get(entry.name, ("", []))
            if version == entry.version:
                yield from self.faults(entry.name, needs, extra)
            else:
                there = version or "not there"
                yield f"the lock has {entry.name} {entry.version}, the installed one is {there}: make install"


def _applies(requirement: Requirement, environment: Environment) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": "", **environment})


def _serves(entry: Entry, needed: Requirement) -> bool:
    return entry.name == canonicalize_name(needed.name) and needed.specifier.contains(
        Version(entry.version), prereleases=True
    )


def read_project(pyproject: str, client: str, constraints: str) -> Project:
    settings = tomllib.loads(pyproject)
    project = settings["project"]
    prefix = "Programming Language :: Python :: "
    return Project(
        project["dependencies"],
        tomllib.loads(client)["project"]["dependencies"],
        project["optional-dependencies"],
        settings["build-system"]["requires"],
        [each.removeprefix(prefix) for each in project["classifiers"] if each.startswith(prefix)],
        [line for line in constraints.splitlines() if line and not line.startswith("#")],
    )


def read_installed() -> Needs:
    return {
        canonicalize_name(each.name): (each.version, each.requires or []) for each in metadata.distributions()
    }


def main() -> int:
    files = ("pyproject.toml", "client/pyproject.toml", "constraints.txt")
    project = read_project(*((ROOT / name).read_text() for name in files))
    try:
        locks = {
            name: read_lock((ROOT / "locks" / f"{name}.lock").read_text())
            for name in (SERVICE, CPU, CUDA, BUILD, INSTALL)
        }
    except LockError as error:
        print(f"locks: {error}", file=sys.stderr)
        return 1
    errors = list(faults(project, locks, read_installed()))
    print("\n".join(errors) or f"locks have all that is needed, {sum(map(len, locks.values()))} packages")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
