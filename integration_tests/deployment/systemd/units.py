"""Parses a systemd unit and its file of variables, and checks our rules for them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from click import UsageError

from integration_tests.deployment.manifests.launch_rules import KNOWN, PROJECT
from integration_tests.deployment.manifests.launches import launch
from integration_tests.deployment.manifests.pods import Pod
from tgis.config.processes import LauncherConfig
from tgis.launcher.plan import END_S
from tgis.router.api.open_files import MAX_GRPC, RESERVED

STATE = "/var/lib"  # value of %S
_VARIABLE = re.compile(r"#?([A-Z][A-Z0-9_]*)=(.*)")
# The unit has comments on the purpose of each.
FIXED = {
    "KillMode": "mixed",
    "KillSignal": "SIGTERM",
    "LimitCORE": "0",
    "MemoryDenyWriteExecute": "no",
    "OOMPolicy": "continue",
    "PrivateTmp": "yes",
    "Restart": "on-failure",
    "RestartPreventExitStatus": str(UsageError.exit_code),
    "Type": "exec",
}
FAMILIES = {"AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"}


@dataclass(frozen=True)
class Unit:
    settings: dict[str, list[str]]
    """Lines of all sections, in order."""
    variables: dict[str, str]
    """Variables of the file."""
    suggested: frozenset[str]
    """Variables in the file's comments."""

    def last(self, name: str) -> str:
        return (self.settings.get(name) or [""])[-1]

    def words(self, name: str) -> list[str]:
        return [
            word for line in self.settings.get(name, []) for word in shlex.split(line.replace("%S", STATE))
        ]

    @property
    def environment(self) -> dict[str, str]:
        """Return the service's environment: the file overrides the unit."""
        return dict(word.split("=", 1) for word in self.words("Environment")) | self.variables

    @property
    def command(self) -> list[str]:
        return self.words("ExecStart")


def read_unit(text: str, variables: str) -> Unit:
    settings: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    matches = [(line, match) for line in variables.splitlines() if (match := _VARIABLE.fullmatch(line))]
    return Unit(
        settings,
        {match[1]: match[2] for line, match in matches if line[0] != "#"},
        frozenset(match[1] for line, match in matches if line[0] == "#"),
    )


def faults(unit: Unit) -> Iterator[str]:
    """Yield the errors, one line each."""
    yield from (f"{name} is not {value}" for name, value in FIXED.items() if unit.last(name) != value)
    if missing := FAMILIES - {*unit.words("RestrictAddressFamilies")}:
        yield f"RestrictAddressFamilies lacks {' '.join(sorted(missing))}"
    program, *arguments = unit.command
    name = PurePath(program).name
    if name not in PROJECT["scripts"]:
        yield f"ExecStart: the project has no command {name}"
    known = {*KNOWN, "HOME", "TMPDIR"}
    yield from (f"nothing reads {each}" for each in {*unit.environment, *unit.suggested} - known)
    container = {
        "command": [name, *arguments],
        "env": [{"name": name, "value": value} for name, value in unit.environment.items()],
    }
    launched = launch(Pod("unit", {}, {}, {}), container)
    yield from launched.problems
    yield from _faults_of_limits(unit, launched.config or LauncherConfig())


def _faults_of_limits(unit: Unit, config: LauncherConfig) -> Iterator[str]:
    stop_s = float(unit.last("TimeoutStopSec"))
    if config.termination_grace_period != stop_s:
        yield f"TERMINATION_GRACE_PERIOD is not the {stop_s:g} s of TimeoutStopSec"
    if config.shutdown_timeout + END_S > stop_s:
        yield f"a drain and {END_S:g} s do not fit into the {stop_s:g} s of TimeoutStopSec"
    if int(unit.last("LimitNOFILE")) < MAX_GRPC + RESERVED:
        yield f"LimitNOFILE is less than {MAX_GRPC} connections and {RESERVED} files need"
    home = f"{STATE}/{unit.last('StateDirectory')}"
    if unit.environment.get("HOME") != home:
        yield f"HOME is not {home}, which can be written"
