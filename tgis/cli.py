"""The commands. With `tgis.options.command`, which generates them from `tgis.config`, the only place that
reads the environment."""

import os
from pathlib import Path
from typing import Any

import click

from tgis import __version__, hub, logs
from tgis.client import client
from tgis.config import FRAMEWORKS, LauncherConfig, RouterConfig, ShardConfig, variables_of
from tgis.options.command import OneLineGroup, command, one_line_errors
from tgis.options.settings import DEFAULT, Setting, SettingsError, check
from tgis.options.tgis_names import TGIS_NAMES


def _run_launcher(config: LauncherConfig) -> None:
    from tgis import launcher

    # The children get all of it as flags; what stayed in the environment they would read, and warn of, again.
    passed = {*variables_of(LauncherConfig)} & {*variables_of(RouterConfig), *variables_of(ShardConfig)}
    for name in passed | {one.variable_name for one in TGIS_NAMES}:
        os.environ.pop(name, None)
    launcher.run(config)


def _run_router(config: RouterConfig) -> None:
    from tgis.router import app

    app.run(config)


def _run_shard(config: ShardConfig) -> None:
    from tgis.shard import server

    server.serve(config)


def _complete_shard(settings: dict[str, Setting], values: dict[str, Any]) -> None:
    """What TGIS's positional arguments and --sharded say. Raises SettingsError, hub.ModelNotFoundError and
    click.UsageError."""
    if values["model_name"] and settings["model_path"].source == DEFAULT:
        names = ("hf_hub_cache", "transformers_cache", "huggingface_hub_cache", "hf_home", "home")
        cache = hub.cache_root(**{name: os.environ.get(name.upper()) for name in names})
        path = hub.resolve(values["model_name"], values["revision"], cache)
        settings["model_path"] = Setting(str(path), "MODEL_NAME")
    if settings["model_path"].value is None:
        raise click.UsageError("Missing option '--model-path', or MODEL_NAME as an argument.")
    check({"deployment_framework": Setting(values["deployment_framework"], "DEPLOYMENT_FRAMEWORK")})
    if values["sharded"]:
        for name, field in (("RANK", "rank"), ("WORLD_SIZE", "world_size")):
            if settings[field].source == DEFAULT:
                raise SettingsError(f"{name} must be set when sharded is True")


def _shard_arguments() -> list[click.Parameter]:
    """Those of TGIS's `serve` that are no options of ours."""
    return [
        click.Argument(["model_name"], required=False),
        click.Argument(
            ["deployment_framework"],
            required=False,
            type=click.Choice(FRAMEWORKS),
            metavar="[DEPLOYMENT_FRAMEWORK]",
        ),
        click.Option(["--revision"], help="Revision of MODEL_NAME in the hub cache.", default=None),
        click.Option(["--sharded/--no-sharded"], help="Insist on a rank and a world size.", default=False),
    ]


launcher_main = command(
    "launcher",
    LauncherConfig,
    _run_launcher,
    "Serve a model: starts, watches and stops the shards and the router.",
    reads="launcher",
)
router_main = command(
    "router",
    RouterConfig,
    _run_router,
    "The router alone, for shards that are there already.",
    reads="router",
)
_serve = command(
    "serve",
    ShardConfig,
    _run_shard,
    "One shard of a model, given by --model-path or by MODEL_NAME.",
    reads="serve",
    extra=_shard_arguments(),
    complete=_complete_shard,
)
_env = command(
    "env",
    LauncherConfig,
    lambda config: None,
    "Print versions, machine and settings as the launcher would find them.",
    reads="launcher",
    only_report=True,
)


@click.group(cls=OneLineGroup)
@click.version_option(__version__)
def server_main() -> None:
    """Serve one shard of a model."""


@click.group(cls=OneLineGroup)
@click.version_option(__version__)
def main() -> None:
    """Text generation behind gRPC."""


@click.command("demo-model")
@click.argument("directory", type=click.Path(path_type=Path))
def demo_model(directory: Path) -> None:
    """Write a small model to DIRECTORY, trained on the spot on the documentation that Python carries with
    it."""
    from tgis import demo

    logs.setup("info", json_output=False)
    with one_line_errors():
        demo.write_demo_model(directory)


server_main.add_command(_serve)
for entry in (launcher_main, router_main, _serve, _env, demo_model, client):
    main.add_command(entry)
