"""The declaration of options and the commands generated from it."""

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tgis import cli
from tgis.config import LauncherConfig, RouterConfig, ShardConfig, declared, to_flags

SHARD = ShardConfig(model_path="/models/x", uds_path="/tmp/shard")
ROUTER = RouterConfig(tokenizer_path="/models/x", shard_uds_path="/tmp/shard")


def parse(config_type: type, arguments: list[str], env: dict[str, str] | None = None) -> Any:
    """What a command makes of its arguments and environment."""
    found = []
    command = cli.command("test", config_type, found.append, "")
    result = CliRunner().invoke(command, arguments, env=env, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found[0]


def test_defaults_of_the_contract() -> None:
    config = parse(LauncherConfig, [])
    assert (config.port, config.grpc_port, config.max_concurrent_requests) == (3000, 8033, 512)
    assert (config.max_new_tokens, config.default_include_stop_seqs, config.bind) == (1024, True, "0.0.0.0")


@pytest.mark.parametrize(
    ("variable", "value", "field", "meaning"),
    [
        ("MODEL_NAME", "/models/x", "model_name", "/models/x"),
        ("GRPC_PORT", "50055", "grpc_port", 50055),
        ("JSON_OUTPUT", "true", "json_output", True),
        ("DEFAULT_INCLUDE_STOP_SEQS", "false", "default_include_stop_seqs", False),
        ("DTYPE_STR", "float16", "dtype_str", "float16"),
        ("NUM_GPUS", "2", "num_gpus", 2),
        ("HF_HUB_CACHE", "/cache", "hf_hub_cache", "/cache"),
    ],
)
def test_environment(variable: str, value: str, field: str, meaning: object) -> None:
    assert getattr(parse(LauncherConfig, [], {variable: value}), field) == meaning


def test_a_flag_goes_before_the_environment() -> None:
    config = parse(LauncherConfig, ["--max-batch-size", "7", "-p", "1"], {"MAX_BATCH_SIZE": "9", "PORT": "2"})
    assert (config.max_batch_size, config.port) == (7, 1)


@pytest.mark.parametrize(
    "config",
    [
        SHARD,
        replace(SHARD, dtype="float16", kv_cache_tokens=100, rank=1, world_size=2, rendezvous="/r", epoch=3),
        ROUTER,
        replace(ROUTER, output_special_tokens=True, default_include_stop_seqs=False, decode_step_ms=12.5),
        LauncherConfig(json_output=True, max_sequence_length=99),
    ],
)
def test_flags_carry_a_configuration_to_a_child(config: object) -> None:
    assert parse(type(config), to_flags(config)) == config


def test_every_option_is_declared_once() -> None:
    """Options of one name, whichever command they belong to, are one declaration."""
    by_name: dict[str, object] = {}
    for config_type in (LauncherConfig, RouterConfig, ShardConfig):
        for f, option, _ in declared(config_type):
            if f.name not in ("shard_uds_path", "num_shard"):  # the launcher's are optional
                assert by_name.setdefault(f.name, option) is option
    shared = {f.name for f in fields(LauncherConfig)}
    assert {f.name for f in fields(RouterConfig)} - shared == {"tokenizer_path"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "70000"],
        ["--dtype", "int3"],
        ["--max-new-tokens", "0"],
        ["--num-shard", "x"],
        ["--nonsense"],
    ],
)
def test_bad_flags_are_one_line(arguments: list[str], tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    result = CliRunner().invoke(cli.launcher_main, ["--termination-log", str(log), *arguments])
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert arguments[0] in line
    if arguments != ["--nonsense"]:  # which is found out before any option is read
        assert log.read_text() == line.removeprefix("error: ") + "\n"


def test_commands_that_only_talk_import_no_torch() -> None:
    """Their start would take seconds."""
    code = "import sys, tgis.cli, tgis.launcher, tgis.router.app, tgis.client; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


def test_every_command_has_help() -> None:
    for command in cli.main.commands.values():
        assert isinstance(command, click.Command)
        assert command.help
