"""Parses a container's arguments and variables with the real commands, without starting a process."""

import functools
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
from click.testing import CliRunner, Result

from integration_tests.deployment.manifests.pods import LAUNCHER, Container, Pod
from tgis.cli.main import server_main
from tgis.cli.process_command import process_command
from tgis.config.processes import LauncherConfig
from tgis.launcher.plan import make_plan

WARNING = re.compile(r"(?m)^\S+ WARNING \S+ (.*)$|^\{.*\"level\": \"WARNING\".*\"message\": (.*)$")


@dataclass(frozen=True)
class Launch:
    config: LauncherConfig | None
    """Configuration; None if the launcher would not start, or for another command."""
    problems: tuple[str, ...]
    """Refusals and warnings."""


def variables(container: Container) -> dict[str, str]:
    """Variables with a value; the others come from secrets."""
    return {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}


def launch(pod: Pod, container: Container) -> Launch:
    words = [*container.get("command", []), *container.get("args", [])]
    return _launch(json.dumps([words, pod.injected | variables(container)]))


def config_of(pod: Pod, container: Container) -> LauncherConfig:
    """Return the launcher's configuration; the defaults if it would not start, which another rule reports."""
    return launch(pod, container).config or LauncherConfig()


@functools.cache
def _launch(text: str) -> Launch:
    words, env = json.loads(text)
    if words[0] == LAUNCHER:
        return _parse_launch(words[1:], env)
    if words[0] == "text-generation-server":
        return Launch(None, tuple(_parse_server(words[1:])))
    return Launch(None, (f"{words[0]} is no command whose arguments could be read",))


def _parse_launch(arguments: list[str], env: Mapping[str, str]) -> Launch:
    configs: list[LauncherConfig] = []

    def keep(config: LauncherConfig) -> None:
        configs.append(config)
        with tempfile.TemporaryDirectory() as model:
            (Path(model) / "config.json").write_text(
                json.dumps({"model_type": "llama", "max_position_embeddings": 1 << 20})
            )
            (Path(model) / "tokenizer.json").write_text("{}")
            make_plan(replace(config, model_name=model))

    result = _invoke(process_command("launcher", LauncherConfig, keep, "", reads="launcher"), arguments, env)
    problems = [first or second for first, second in WARNING.findall(result.stderr)]
    if result.exit_code:
        return Launch(None, (*problems, result.stderr.strip().splitlines()[-1]))
    return Launch(configs[0], tuple(problems))


def _invoke(parser: click.Command, arguments: list[str], env: Mapping[str, str]) -> Result:
    """Run the command with only these variables."""
    with _own_logging(), patch.dict(os.environ, dict(env), clear=True):
        return CliRunner().invoke(parser, arguments)


@contextmanager
def _own_logging() -> Iterator[None]:
    """Restore the tests' log handlers, because the command sets up the root logger."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _parse_server(arguments: list[str]) -> Iterator[str]:
    name, *rest = arguments or [""]
    command: Any = server_main.commands.get(name)
    if command is None:
        yield f"text-generation-server has no command {name!r}"
        return
    try:
        command.make_context(name, rest)
    except click.ClickException as error:
        yield error.format_message()
