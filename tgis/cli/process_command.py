"""Builds the commands that start processes; they also accept other servers' option names."""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass
from itertools import pairwise
from typing import Any, TypeVar, get_args

import click
from click.core import ParameterSource

from tgis import __version__, log_output, logs
from tgis.cli.command import (
    ARGUMENTS,
    VERSION_NAMES,
    GroupedOption,
    OneLineCommand,
    json_fields,
    parameters,
)
from tgis.config import log_level, report
from tgis.config.aliases.alias import Alias
from tgis.config.aliases.tgis import TGIS_NAMES
from tgis.config.checks import DEFAULT, GivenAlias, Setting, apply_aliases, apply_defaults, check
from tgis.config.option import Group, Option, Secret, declared, env_of, flag_of
from tgis.config.option_names import OptionNames, PropertyOutcomes
from tgis.config.processes import ProcessOptions
from tgis.process import json_lines
from tgis.router.api import registry

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=ProcessOptions)

ALIAS = "alias_"  # prefix of the parameter names of aliases


class ProcessCommand(OneLineCommand):
    """Command whose help lists options by group, and that also accepts vLLM's and TGI's command lines."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        has_compat = any(parameter.name == "compat" for parameter in self.params)
        compat = _find_compat(args) if has_compat else None
        server = _server(compat)
        if server is not None and server.rewrite is not None:
            switches = {
                name
                for parameter in self.params
                if getattr(parameter, "is_flag", False)
                for name in parameter.opts
            }
            args = server.rewrite(args, switches)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records: dict[Group | None, list[tuple[str, str]]] = {group: [] for group in (*Group, None)}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                records[getattr(parameter, "group", None)].append(record)
        for group, rows in records.items():
            if rows:
                with formatter.section(group.value if group else "Options"):
                    formatter.write_dl(rows)


@dataclass(frozen=True)
class ExtraParameters:
    """Parameters of a command that are not fields of its configuration."""

    parameters: Sequence[click.Parameter]
    complete: Callable[[dict[str, Setting], dict[str, Any]], None]
    """Turns the parameters' values into settings. Also reports missing options."""


def process_command(
    name: str,
    config_type: type[C],
    run: Callable[[C], None] | None,
    help: str,
    *,
    reads: str = "",
    extra: ExtraParameters | None = None,
    process: str = "",
) -> click.Command:
    """Build a command whose options are the fields of `config_type`, `extra` and the aliases.

    `reads` is the command's name in the tables of aliases, `process` its name in JSON lines. Without `run`,
    the command only prints its settings."""

    def call(**values: Any) -> None:
        log_output.install()
        context = click.get_current_context()
        fields = json_fields(context, values)
        if fields:
            logs.setup("info", json_output=True, process=fields)
        settings = {
            field.name: _setting(context, field, option, hint)
            for field, option, hint in declared(config_type)
        }
        if extra:
            names = [parameter.name for parameter in extra.parameters if parameter.name]
            extra.complete(settings, {name: values[name] for name in names})
        warnings = [(logging.WARNING, text) for text in _read_aliases(context, settings, reads)]
        outcomes = _read_properties(context, settings)
        if run is None:
            print("\n".join([report.describe(settings), *(outcomes.describe() if outcomes else ())]))
            return
        notices = [*warnings, *(outcomes.to_notices(settings) if outcomes is not None else ())]
        _require_model(context, settings)
        run(_configure(config_type, settings, notices, fields))

    options = parameters(config_type, is_required=extra is None)
    aliases = [*map(_alias_flag, _flags_of(reads))]
    command = ProcessCommand(
        name, callback=call, params=[*options, *(extra.parameters if extra else ()), *aliases], help=help
    )
    command.process = process
    return click.version_option(__version__, *VERSION_NAMES)(command)


def _alias_flag(alias: Alias) -> click.Option:
    return GroupedOption(
        [alias.flag_name, ALIAS + alias.name, *([alias.short] if alias.short else [])],
        is_flag=alias.switch,
        default=None,
        hidden=alias not in TGIS_NAMES,
        help=f"Same as --{alias.means.replace('_', '-')}." if alias.means else f"No effect: {alias.why}.",
        group=Group.COMPATIBILITY,
    )


def _flags_of(command_name: str) -> list[Alias]:
    """Return one alias for each flag that a command accepts; servers may share a flag."""
    names = [*TGIS_NAMES, *registry.foreign_aliases()]
    flags = {alias.name: alias for alias in reversed(names) if alias.flag and command_name in alias.commands}
    return [*reversed(flags.values())]


def _setting(context: click.Context, field: Field[Any], option: Option, hint: Any) -> Setting:
    if not option.flag:
        for name in filter(None, (field.name.upper(), option.older_env)):
            if text := os.environ.get(name, "").strip():
                return Setting(Secret(text) if Secret in get_args(hint) else text, name)
        return Setting(field.default)
    value = context.params[field.name]
    source = context.get_parameter_source(field.name)
    if source is ParameterSource.COMMANDLINE:
        return Setting(value, flag_of(field))
    if source is not ParameterSource.ENVIRONMENT:
        return Setting(value)
    names = (env_of(field), option.older_env)
    return Setting(value, next(name for name in names if name and os.environ.get(name)))


def _read_aliases(context: click.Context, settings: dict[str, Setting], reads: str) -> list[str]:
    """Apply the given aliases to the settings; return the warnings."""
    compat = _compat(settings)
    server = _server(compat)
    if server is not None:
        _refuse_ambiguous_flags(context, server)
    _refuse_unread_flags(context, compat)
    names = [*TGIS_NAMES, *(server.aliases if server is not None else ())]
    given = [value for alias in names if reads in alias.commands and (value := _given(context, alias))]
    if server is not None and server.properties is not None:
        defaults = {
            parameter.name: parameter.default for parameter in context.command.params if parameter.name
        }
        server.properties.forget_shared_names(settings, defaults)
    warnings = apply_aliases(given, settings, _reader(context))
    if server is not None:
        apply_defaults(server.defaults, settings, f"--compat {server.name}")
    return warnings


def _refuse_ambiguous_flags(context: click.Context, server: OptionNames) -> None:
    """Raise a usage error for a flag that means different options here and there."""
    compat = server.name
    for flag, instead in server.ambiguous_flags.items():
        if any(argument.startswith(flag) for argument in context.meta[ARGUMENTS]):
            raise click.UsageError(
                f"under --compat {compat}, write {instead} instead of {flag}, which means one here and "
                "the other there",
                context,
            )


def _reader(context: click.Context) -> Callable[[str, str, str], Any]:
    """Return a converter of (name of the service's own option, text, source) to the option's value."""
    parameters = {parameter.name: parameter for parameter in context.command.params}

    def read(name: str, text: str, source: str) -> Any:
        if name not in parameters:
            return Secret(text)  # every other option that an alias stands for has a flag
        try:
            return parameters[name].type.convert(text, parameters[name], context)
        except click.BadParameter as error:
            if error.exit_code == 2:
                error.param_hint = source
            raise

    return read


def _read_properties(context: click.Context, settings: dict[str, Setting]) -> PropertyOutcomes | None:
    """Apply names of properties to the settings if the server of --compat has any."""
    server = _server(_compat(settings))
    if server is None or server.properties is None:
        return None
    convert = _reader(context)

    def read(name: str, text: str) -> Any:
        try:
            return convert(name, text, "")
        except click.BadParameter as error:
            raise ValueError(error.message) from error

    return server.properties.apply(settings, read)


def _server(compat: str | None) -> OptionNames | None:
    return next((server for server in registry.option_names() if server.name == compat), None)


def _find_compat(arguments: Sequence[str]) -> str | None:
    """Return the value of `--compat`, else of the variable COMPAT."""
    for word, next_word in pairwise([*arguments, ""]):
        if word == "--compat" or word.startswith("--compat="):
            return word.partition("=")[2] or next_word
    return os.environ.get("COMPAT")


def _compat(settings: Mapping[str, Setting]) -> str | None:
    return settings["compat"].value if "compat" in settings else None


def _require_model(context: click.Context, settings: Mapping[str, Setting]) -> None:
    """Raise a usage error if --compat is given without a model."""
    compat = _compat(settings)
    server = _server(compat)
    if server is not None and settings["model_name"].source == DEFAULT:
        raise click.UsageError(
            f"Missing option '{server.model_flag}': --compat {compat} has no default model",
            context,
        )


def _refuse_unread_flags(context: click.Context, compat: str | None) -> None:
    """Raise a usage error for a flag of a server that --compat does not name."""
    read = {alias.name for alias in TGIS_NAMES if alias.flag}
    servers = registry.option_names()
    read |= {alias.name for server in servers if server.name == compat for alias in server.aliases}
    for server in servers:
        for alias in server.aliases:
            if alias.name not in read and context.params.get(ALIAS + alias.name) is not None:
                text = (
                    f"No such option: {alias.flag_name}; it is {server.title}'s: add --compat {server.name} "
                )
                raise click.UsageError(text + f"to use {server.title}'s names", context)


def _given(context: click.Context, alias: Alias) -> GivenAlias | None:
    """Return an alias with the value of its flag, else of its variable; None if neither is set."""
    if alias.flag and (value := context.params.get(ALIAS + alias.name)) is not None:
        return GivenAlias(alias, str(value).lower() if alias.switch else value, alias.flag_name)
    if not alias.variable:
        return None
    text = os.environ.get(alias.variable_name, "")
    is_given = text.strip() and not (alias.switch and text == "false")
    return GivenAlias(alias, text, alias.variable_name) if is_given else None


def _configure(
    config_type: type[C],
    settings: dict[str, Setting],
    notices: Sequence[tuple[int, str]],
    fields: Mapping[str, logs.Scalar] | None,
) -> C:
    """Set up logging, check the settings, log them with the warnings, and return the configuration."""
    level, notice = log_level.parse(settings["log_level"].value)
    settings["log_level"] = Setting(level, settings["log_level"].source)
    config = config_type(**{name: setting.value for name, setting in settings.items()})
    logs.setup(config.log_level, config.json_output, fields or {})
    if "env" in settings and settings["env"].value:
        text = report.describe(settings)
        print(json_lines.to_json(text, fields, "INFO") if fields else text, file=sys.stderr, flush=True)
    warnings = [*filter(None, [notice]), *check(settings, registry.http_names(), registry.grpc_names())]
    for severity, text in [*notices, *((logging.WARNING, text) for text in warnings)]:
        logger.log(severity, "%s", text)
    names = [field.name for field, option, _ in declared(config_type) if option.flag]
    given = [
        f"{name}={report.shown(settings[name].value)}" for name in names if settings[name].source != DEFAULT
    ]
    logger.log(
        logging.INFO if "env" in settings else logging.DEBUG, "settings: %s", " ".join(given) or "none"
    )
    return config
