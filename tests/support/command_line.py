"""Runs commands with a configuration's options in this process."""

import functools
from typing import Any

import click
from click.testing import CliRunner, Result

from tgis.cli.process_command import process_command
from tgis.config.processes import LauncherConfig, RouterConfig, ShardConfig

REQUIRED = {
    LauncherConfig: [],
    RouterConfig: ["--tokenizer-path", "/x"],
    ShardConfig: ["--model-path", "/x"],
}
TYPES = {"launcher": LauncherConfig, "router": RouterConfig, "serve": ShardConfig}
BLANK = {"HOME": None, "HF_HUB_OFFLINE": None}  # do not use settings of this machine or of another test


def run(
    config_type: type, arguments: list[str], env: dict[str, str] | None = None, reads: str = ""
) -> tuple[Any, Result]:
    """Return the configuration that a command creates from its arguments and environment, and its output."""
    command, results = _command(config_type, reads)
    results.clear()
    result = CliRunner().invoke(command, arguments, env={**BLANK, **(env or {})}, catch_exceptions=False)
    return (results or [None])[0], result


@functools.cache
def _command(config_type: type, reads: str) -> tuple[click.Command, list[Any]]:
    """Return a command and the list to which it appends configurations. Building it takes as long as
    running it."""
    results: list[Any] = []
    return process_command("test", config_type, results.append, "", reads=reads), results


def parse(config_type: type, arguments: list[str], env: dict[str, str] | None = None) -> Any:
    config, result = run(config_type, arguments, env)
    assert result.exit_code == 0, result.output
    return config


def refusal(
    arguments: list[str], env: dict[str, str] | None = None, code: int = 1, reads: str = "launcher"
) -> str:
    """Return the single line of a failed start."""
    config, result = run(TYPES[reads], [*arguments, *REQUIRED[TYPES[reads]]], env, reads)
    assert (config, result.exit_code) == (None, code), result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    assert lines[0] == result.stderr.splitlines()[-1]
    return lines[0].removeprefix("error: ")
