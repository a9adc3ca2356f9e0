"""Defines `tgis` and TGIS's commands for launcher, router and server.

Only `tgis.cli` reads options from the environment."""

import gc
import logging
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from tgis import __version__, failpoints, logs
from tgis.cli import models, prompts
from tgis.cli.command import VERSION_NAMES, CommandTable, GroupedOption, OneLineGroup
from tgis.cli.health_probe import health_probe
from tgis.cli.process_command import ExtraParameters, process_command
from tgis.cli.quantize import quantize
from tgis.config.aliases.tgis import TGIS_NAMES
from tgis.config.checks import DEFAULT, Setting, SettingsError
from tgis.config.model import FRAMEWORKS
from tgis.config.option import Group, to_flags, variables_of
from tgis.config.processes import LauncherConfig, RouterConfig, ShardConfig
from tgis.hub import model_files
from tgis.hub.cache import find_model
from tgis.hub.gguf_files import refuse_gguf
from tgis.hub.speculators import find_speculator
from tgis.hub.startup_adapters import resolve_adapter_options
from tgis.process.handover import receive_options
from tgis.process.heartbeat import Heartbeat
from tgis.router.api.registry import foreign_aliases

logger = logging.getLogger(__name__)

SECRETS = ("auth_tokens", "hf_token")
SECRET_VARIABLES = (
    *("AUTH_TOKENS", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPTION_HF_TOKEN"),
    "HF_ENDPOINT",  # a URL may contain credentials
)


def _begin(config: LauncherConfig | RouterConfig | ShardConfig, *facts: str) -> None:
    """Arm the failpoints and, with JSON output, log what Python would print. Raises FailpointError."""
    failpoints.arm(config.failpoints, *facts)
    if config.json_output:
        logs.catch_unlogged()


def _run_launcher(config: LauncherConfig) -> None:
    _begin(config)
    from tgis.launcher import main

    # The children get all options as flags. They would parse the variables again, and repeat the warnings.
    passed = {*variables_of(LauncherConfig)} & {*variables_of(RouterConfig), *variables_of(ShardConfig)}
    secrets = {one.variable_name for one in foreign_aliases() if one.means in SECRETS} | {*SECRET_VARIABLES}
    for name in passed | secrets | {one.variable_name for one in TGIS_NAMES}:
        os.environ.pop(name, None)
    _stay_offline()
    main.run(config)


def _run_router(config: RouterConfig) -> None:
    _begin(config)
    from tgis.router import app

    app.run(config)


def _run_engine(config: RouterConfig) -> None:
    if config.engine_path is None:
        raise click.UsageError("Missing option '--engine-path'.")
    _begin(config)
    from tgis.router import engine_app

    engine_app.run(config)


def _run_shard(config: ShardConfig) -> None:
    heartbeat = Heartbeat(config.heartbeat_fd)  # before the imports, which also may hang
    _stay_offline()
    if config.options_fd is not None:
        config = _receive_options(config.options_fd, config.device)
    _begin(config, f"rank={config.rank}", f"epoch={config.epoch}")
    settings = model_files.read_config(Path(config.model_path))
    length = config.max_sequence_length or model_files.max_sequence_length(settings)
    cache = models.cache_root() if config.lora_adapters or config.speculator else Path()
    tuning = resolve_adapter_options(config, length, cache)
    gc.disable()  # imports and loading produce no garbage; the server decides when to collect
    from tgis.shard import server

    speculator = str(find_speculator(config.speculator, cache)) if config.speculator else None
    server.serve(replace(config, speculator=speculator, **asdict(tuning)), heartbeat)


def _receive_options(fd: int, device: str) -> ShardConfig:
    """Import the libraries of a shard on `device`, and then wait for the launcher's options. Raises
    HandoverError."""
    gc.disable()  # imports produce no garbage
    from tgis.shard import server  # noqa: F401
    from tgis.shard.startup.platforms import choose_platform

    choose_platform.import_platform(device)
    options, fds = receive_options(fd)
    if fds:
        options["rendezvous_fd"] = fds[0]  # the launcher's number means nothing here
    config = ShardConfig(**options)
    logger.debug("options from the launcher: %s", " ".join(to_flags(config)))
    return config


def _stay_offline() -> None:
    """Keep libraries from contacting a hub; serving never needs one."""
    os.environ["HF_HUB_OFFLINE"] = "1"


def _complete_shard(settings: dict[str, Setting], values: dict[str, Any]) -> None:
    """Apply TGIS's arguments and --sharded. Raises SettingsError, ModelNotFoundError, click.UsageError."""
    if values["model_name"] and settings["model_path"].source == DEFAULT:
        refuse_gguf(Path(values["model_name"]))
        path = find_model(values["model_name"], values["revision"], models.cache_root())
        settings["model_path"] = Setting(str(path), "MODEL_NAME")
    if settings["model_path"].value is None and settings["options_fd"].value is None:
        raise click.UsageError("Missing option '--model-path', or MODEL_NAME as an argument.")
    if values["framework"] and settings["deployment_framework"].source == DEFAULT:
        settings["deployment_framework"] = Setting(values["framework"], "DEPLOYMENT_FRAMEWORK")
    if values["sharded"]:
        for name, field in (("RANK", "rank"), ("WORLD_SIZE", "world_size")):
            if settings[field].source == DEFAULT:
                raise SettingsError(f"{name} must be set when sharded is True")


def _shard_arguments() -> list[click.Parameter]:
    """Return the parameters of TGIS's `serve` that are not options of ShardConfig."""
    return [
        click.Argument(["model_name"], required=False),
        click.Argument(
            ["framework"],
            required=False,
            type=click.Choice(FRAMEWORKS),
            metavar="[DEPLOYMENT_FRAMEWORK]",
        ),
        GroupedOption(
            ["--revision"],
            help="Revision of MODEL_NAME in the hub cache; unset: main.",
            default=None,
            group=Group.MODEL,
        ),
        GroupedOption(
            ["--sharded/--no-sharded"],
            help="Require RANK and WORLD_SIZE to be set.",
            default=False,
            group=Group.COMPATIBILITY,
        ),
    ]


launcher_main = process_command(
    "launcher",
    LauncherConfig,
    _run_launcher,
    "Serve a model: start, watch and stop the shards and the router.",
    reads="launcher",
    process="launcher",
)
router_main = process_command(
    "router",
    RouterConfig,
    _run_router,
    "Run only the router, for shards that already run.",
    reads="router",
    process="router",
)
_engine = process_command(
    "engine",
    RouterConfig,
    _run_engine,
    "Run the engine process of a router with several workers, for shards that already run.",
    reads="router",
    process="engine",
)
_serve = process_command(
    "serve",
    ShardConfig,
    _run_shard,
    "Run one shard of a model, given by --model-path or by MODEL_NAME.",
    reads="serve",
    extra=ExtraParameters(_shard_arguments(), _complete_shard),
    process="shard",
)
_env = process_command(
    "env",
    LauncherConfig,
    None,
    "Print versions, machine and settings as the launcher would use them.",
    reads="launcher",
)


@click.group(cls=OneLineGroup)
@click.version_option(__version__, *VERSION_NAMES)
def server_main() -> None:
    """Serve one shard of a model, or download and convert models."""


def _client() -> click.Command:
    from tgis.cli.client.command import command

    return command


def _top() -> click.Command:
    from tgis.cli.top.command import command

    return command


def _bench() -> click.Command:
    from tgis.cli.bench.command import command

    return command


@click.group(cls=OneLineGroup, commands=CommandTable({"client": _client, "top": _top, "bench": _bench}))
@click.version_option(__version__, *VERSION_NAMES)
def main() -> None:
    """Serve text generation over gRPC and HTTP."""


for entry in (_serve, health_probe, *models.COMMANDS, quantize, *prompts.COMMANDS):
    server_main.add_command(entry)
    main.add_command(entry)
for entry in (launcher_main, router_main, _engine, _env):
    main.add_command(entry)
