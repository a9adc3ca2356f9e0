"""Builds the commands that start processes, which also take other servers' option names."""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field
from typing import Any, TypeVar, get_args

import click
from click.core import ParameterSource

from tgis import __version__, logs
from tgis.cli import compat_arguments
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
Complete = Callable[[dict[str, Setting], dict[str, Any]], None]

FOREIGN = "foreign_"  # prefix of the parameter names of foreign options


class ProcessCommand(OneLineCommand):
    """Command whose help lists its options by group. It takes command lines in other spellings too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        has_compat = any(one.name == "compat" for one in self.params)
        compat = compat_arguments.compat_of(args) if has_compat else None
        server = _server(compat)
        if server is not None and server.rewrite is not None:
            switches = {name for one in self.params if getattr(one, "is_flag", False) for name in one.opts}
            args = server.rewrite(args, switches)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records: dict[Group | None, list[tuple[str, str]]] = {group: [] for group in (*Group, None)}
        for one in self.get_params(ctx):
            if record := one.get_help_record(ctx):
                records[getattr(one, "group", None)].append(record)
        for group, rows in records.items():
            if rows:
                with formatter.section(group.value if group else "Options"):
                    formatter.write_dl(rows)


def process_command(
    name: str,
    config_type: type[C],
    run: Callable[[C], None],
    help: str,
    *,
    reads: str = "",
    extra: Sequence[click.Parameter] = (),
    complete: Complete | None = None,
    only_report: bool = False,
    process: str = "",
) -> click.Command:
    """Build a command with the fields of `config_type`, `extra` and foreign names as options.

    `reads` is its name in the tables of foreign names, `process` that in JSON lines. `complete` turns the
    values of `extra` into settings. With `only_report` it prints the settings and does not call `run`."""

    def call(**values: Any) -> None:
        context = click.get_current_context()
        fields = json_fields(context, values)
        if fields:
            logs.setup("info", json_output=True, process=fields)
        settings = {f.name: _setting(context, f, option, hint) for f, option, hint in declared(config_type)}
        if complete:
            complete(settings, {one.name: values[one.name] for one in extra if one.name})
        warnings = [(logging.WARNING, text) for text in _read_foreign(context, settings, reads)]
        outcomes = _read_properties(context, settings)
        if only_report:
            print("\n".join([report.describe(settings), *(outcomes.describe() if outcomes else ())]))
        else:
            notices = [*warnings, *(outcomes.to_notices(settings) if outcomes is not None else ())]
            _require_model(context, settings)
            run(_configure(config_type, settings, notices, fields))

    options = parameters(config_type, is_required=complete is None)
    theirs = [*map(_foreign_flag, _flags_of(reads))]
    made = ProcessCommand(name, callback=call, params=[*options, *extra, *theirs], help=help)
    made.process = process
    return click.version_option(__version__, *VERSION_NAMES)(made)


def _foreign_flag(foreign: Alias) -> click.Option:
    return GroupedOption(
        [foreign.flag_name, FOREIGN + foreign.name, *([foreign.short] if foreign.short else [])],
        is_flag=foreign.switch,
        default=None,
        hidden=foreign not in TGIS_NAMES,
        help=f"Means --{foreign.means.replace('_', '-')}." if foreign.means else f"No effect: {foreign.why}.",
        group=Group.COMPATIBILITY,
    )


def _flags_of(command_name: str) -> list[Alias]:
    """Return one alias for each foreign flag of a command; servers may share a flag."""
    names = [*TGIS_NAMES, *registry.foreign_aliases()]
    flags = {one.name: one for one in reversed(names) if one.flag and command_name in one.commands}
    return [*reversed(flags.values())]


def _setting(context: click.Context, f: Field[Any], option: Option, hint: Any) -> Setting:
    if not option.flag:
        for name in filter(None, (f.name.upper(), option.older_env)):
            if text := os.environ.get(name, "").strip():
                return Setting(Secret(text) if Secret in get_args(hint) else text, name)
        return Setting(f.default)
    value, source = context.params[f.name], context.get_parameter_source(f.name)
    if source is ParameterSource.COMMANDLINE:
        return Setting(value, flag_of(f))
    if source is not ParameterSource.ENVIRONMENT:
        return Setting(value)
    names = (env_of(f), option.older_env)
    return Setting(value, next(name for name in names if name and os.environ.get(name)))


def _read_foreign(context: click.Context, settings: dict[str, Setting], reads: str) -> list[str]:
    """Apply the foreign names that were given to the settings; return the warnings."""
    compat = _compat(settings)
    server = _server(compat)
    if server is not None:
        _refuse_ambiguous_flags(context, server)
    _refuse_unread_flags(context, compat)
    names = [*TGIS_NAMES, *(server.aliases if server is not None else ())]
    given = [found for one in names if reads in one.commands and (found := _given(context, one))]
    if server is not None and server.properties is not None:
        defaults = {one.name: one.default for one in context.command.params if one.name}
        server.properties.forget_shared_names(settings, defaults)
    warnings = apply_aliases(given, settings, _reader(context))
    if server is not None:
        apply_defaults(server.defaults, settings, f"--compat {server.name}")
    return warnings


def _refuse_ambiguous_flags(context: click.Context, server: OptionNames) -> None:
    """Raise a usage error for a flag that means different options here and there."""
    compat = server.name
    for flag, instead in server.ambiguous_flags.items():
        if any(one.startswith(flag) for one in context.meta[ARGUMENTS]):
            raise click.UsageError(
                f"under --compat {compat}, write {instead} instead of {flag}, which means one here and "
                "the other there",
                context,
            )


def _reader(context: click.Context) -> Callable[[str, str, str], Any]:
    """Return a converter of (name of the service's own option, text, source) to the option's value."""
    parameters = {one.name: one for one in context.command.params}

    def read(name: str, text: str, source: str) -> Any:
        if name not in parameters:
            return Secret(text)  # every other option that a foreign name means has a flag
        try:
            return parameters[name].type.convert(text, parameters[name], context)
        except click.BadParameter as error:
            if error.exit_code == 2:
                error.param_hint = source
            raise

    return read


def _read_properties(context: click.Context, settings: dict[str, Setting]) -> PropertyOutcomes | None:
    """Apply names of properties to the settings, if the server whose names are read has any."""
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
    return next((each for each in registry.option_names() if each.name == compat), None)


def _compat(settings: Mapping[str, Setting]) -> str | None:
    return settings["compat"].value if "compat" in settings else None


def _require_model(context: click.Context, settings: Mapping[str, Setting]) -> None:
    """Raise a usage error if another server's names are read and no model is given."""
    compat = _compat(settings)
    server = _server(compat)
    if server is not None and settings["model_name"].source == DEFAULT:
        raise click.UsageError(
            f"Missing option '{server.model_flag}': --compat {compat} has no default model",
            context,
        )


def _refuse_unread_flags(context: click.Context, compat: str | None) -> None:
    """Raise a usage error for a flag that only servers have whose names are not read."""
    read = {one.name for one in TGIS_NAMES if one.flag}
    servers = registry.option_names()
    read |= {one.name for server in servers if server.name == compat for one in server.aliases}
    for server in servers:
        for one in server.aliases:
            if one.name not in read and context.params.get(FOREIGN + one.name) is not None:
                text = f"No such option: {one.flag_name}; it is {server.title}'s: add --compat {server.name} "
                raise click.UsageError(text + f"to use {server.title}'s names", context)


def _given(context: click.Context, foreign: Alias) -> GivenAlias | None:
    """Return what a foreign name's flag, else its variable, gives."""
    if foreign.flag and (value := context.params.get(FOREIGN + foreign.name)) is not None:
        return GivenAlias(foreign, str(value).lower() if foreign.switch else value, foreign.flag_name)
    if not foreign.variable:
        return None
    text = os.environ.get(foreign.variable_name, "")
    is_given = text.strip() and not (foreign.switch and text == "false")
    return GivenAlias(foreign, text, foreign.variable_name) if is_given else None


def _configure(
    config_type: type[C],
    settings: dict[str, Setting],
    notices: Sequence[tuple[int, str]],
    fields: Mapping[str, logs.Scalar] | None,
) -> C:
    """Set up logging, check the settings, log warnings and settings, and return the configuration."""
    level, notice = log_level.parse(settings["log_level"].value)
    settings["log_level"] = Setting(level, settings["log_level"].source)
    config = config_type(**{name: setting.value for name, setting in settings.items()})
    logs.setup(config.log_level, config.json_output, fields or {})
    if "env" in settings and settings["env"].value:
        text = report.describe(settings)
        print(json_lines.to_json(text, fields, "INFO") if fields else text, file=sys.stderr, flush=True)
    warnings = [*filter(None, [notice]), *check(settings, registry.http_names())]
    for severity, text in [*notices, *((logging.WARNING, text) for text in warnings)]:
        logger.log(severity, "%s", text)
    ours = [f.name for f, option, _ in declared(config_type) if option.flag]
    given = [
        f"{name}={report.shown(settings[name].value)}" for name in ours if settings[name].source != DEFAULT
    ]
    logger.log(
        logging.INFO if "env" in settings else logging.DEBUG, "settings: %s", " ".join(given) or "none"
    )
    return config
