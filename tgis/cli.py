"""The commands. Their options are generated from `tgis.config`, the only place that reads the environment; a
failure is one line, `error: ...`, and an exit code that is not 0."""

import contextlib
import logging
import sys
from collections.abc import Callable
from dataclasses import MISSING
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TypeVar, get_args

import click

from tgis import __version__, logs
from tgis.child import ERROR_PREFIX
from tgis.client import client
from tgis.config import (
    LauncherConfig,
    LogOptions,
    Option,
    RouterConfig,
    ShardConfig,
    declared,
    env_of,
    flag_of,
)
from tgis.errors import OperatorError

C = TypeVar("C", bound=LogOptions)


class _OneLine(click.Command):
    """A command whose usage errors are one line too."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.ClickException as error:
            _fail(error.format_message(), _termination_log_of(error), error.exit_code)


class _OneLineGroup(_OneLine, click.Group):
    pass


def command(name: str, config_type: type[C], run: Callable[[C], None], help: str) -> click.Command:
    """A command whose options are the fields of `config_type`."""

    def call(**values: Any) -> None:
        config = config_type(**values)
        logs.setup(config.log_level, config.json_output)
        _run_to_one_line(lambda: run(config), values.get("termination_log"))

    parameters: list[click.Parameter] = [
        _parameter(f, option, hint) for f, option, hint in declared(config_type)
    ]
    return _OneLine(
        name, callback=call, params=parameters, help=help, context_settings={"show_default": True}
    )


def _parameter(f: Any, option: Option, hint: Any) -> click.Option:
    names = [flag_of(f), f.name] + ([option.short] if option.short else [])
    is_flag = hint is bool and not option.takes_value
    required = f.default is MISSING
    return click.Option(
        names,
        type=None if is_flag else _click_type(option, hint),
        is_flag=is_flag,
        required=required,
        default=None if required else f.default,
        envvar=env_of(f),
        show_envvar=True,
        is_eager=f.name == "termination_log",  # known before other options are found to be wrong
        help=option.help,
    )


def _click_type(option: Option, hint: Any) -> click.ParamType[Any]:
    kind = next((part for part in get_args(hint) if part is not NoneType), hint)
    if option.choices:
        return click.Choice(option.choices)
    if kind is int:
        return click.IntRange(_int(option.minimum), _int(option.maximum))
    if kind is float:
        return click.FloatRange(option.minimum, option.maximum)
    return click.BOOL if kind is bool else click.STRING


def _int(value: float | None) -> int | None:
    return None if value is None else int(value)


def _run_to_one_line(run: Callable[[], None], termination_log: str | None = None) -> None:
    try:
        run()
    except OperatorError as error:
        _fail(str(error), termination_log)
    except Exception as error:
        logging.getLogger(__name__).exception("unforeseen failure")
        _fail(f"{type(error).__name__}: {error}", termination_log)


def _fail(text: str, termination_log: str | None = None, exit_code: int = 1) -> NoReturn:
    line = " ".join(text.split())
    print(ERROR_PREFIX + line, file=sys.stderr, flush=True)
    if termination_log:
        with contextlib.suppress(OSError):  # there is none outside a cluster, or it may not be written
            Path(termination_log).write_text(line + "\n")
    sys.exit(exit_code)


def _termination_log_of(error: click.ClickException) -> str | None:
    """Of a launcher whose options could not be read: the option if it was read before, else its default."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    options = {} if context is None else {p.name: p.default for p in context.command.params}
    log = options.get("termination_log")
    return str(context.params.get("termination_log") or log) if context and log else None


def _run_launcher(config: LauncherConfig) -> None:
    from tgis import launcher

    launcher.run(config)


def _run_router(config: RouterConfig) -> None:
    from tgis.router import app

    app.run(config)


def _run_shard(config: ShardConfig) -> None:
    from tgis.shard import server

    server.serve(config)


launcher_main = command(
    "launcher",
    LauncherConfig,
    _run_launcher,
    "Serve a model: starts, watches and stops the shards and the router.",
)
router_main = command(
    "router", RouterConfig, _run_router, "The router alone, for shards that are there already."
)
_serve = command("serve", ShardConfig, _run_shard, "One shard of a model.")


@click.group(cls=_OneLineGroup)
@click.version_option(__version__)
def server_main() -> None:
    """Serve one shard of a model."""


@click.group(cls=_OneLineGroup)
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
    _run_to_one_line(lambda: demo.write_demo_model(directory))


server_main.add_command(_serve)
for entry in (launcher_main, router_main, _serve, demo_model, client):
    main.add_command(entry)
