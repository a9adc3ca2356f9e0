"""Signals while a command imports its modules."""

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tgis.cli import main
from tgis.cli.command import CommandTable, OneLineGroup

SCRIPTS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
OURS = {name: target.split(":")[1] for name, target in SCRIPTS.items() if target.startswith("tgis.cli.entry")}


def start(name: str, before: str = "") -> "subprocess.Popen[str]":
    """Start a command as its script does. Python reports each import."""
    code = f"import signal\n{before}\nfrom tgis.cli.entry import {OURS[name]} as run\nrun()"
    command = [sys.executable, "-X", "importtime", "-c", code, "--version"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def interrupt(process: "subprocess.Popen[str]") -> tuple[int, str, list[str]]:
    """Send SIGINT during the import of `tgis.cli.main`. Return status, output and the lines on stderr that
    report no import."""
    assert process.stderr is not None
    next(line for line in process.stderr if line.endswith(" click\n"))
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, [one for one in errors.splitlines() if "import time:" not in one]


@pytest.mark.parametrize("name", OURS)
def test_an_interrupt_while_importing_ends_quietly(name: str) -> None:
    with start(name) as process:
        assert interrupt(process) == (-signal.SIGINT, "", [])


def test_an_ignored_interrupt_stays_ignored() -> None:
    """Background jobs of scripts ignore SIGINT."""
    with start("tgis", "signal.signal(signal.SIGINT, signal.SIG_IGN)") as process:
        code, output, lines = interrupt(process)
    assert (code, lines) == (0, [])
    assert ", version " in output


def test_an_interrupt_before_a_command_runs_has_the_status_of_shells() -> None:
    def import_command() -> click.Command:
        raise KeyboardInterrupt

    group = OneLineGroup("group", commands=CommandTable({"slow": import_command}))
    result = CliRunner().invoke(group, ["slow"])
    assert (result.exit_code, result.output.strip()) == (130, "")


def test_every_command_has_an_entry_point() -> None:
    assert sorted(OURS) == [
        "text-generation-launcher",
        "text-generation-router",
        "text-generation-server",
        "tgis",
    ]
    assert all(hasattr(main, target) for target in OURS.values())
