"""Builds a command from a configuration class: its options are the fields, set by flags and variables.

The command also accepts other servers' option names. A failure prints one line, `error: ...`, and exits with
a code other than 0."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from click.core import ParameterSource

from tgis import __version__, logs
from tgis.cli.parameters import FOREIGN, HELP_NAMES, VERSION_NAMES, foreign_flag, parameter
from tgis.config import log_level, report
from tgis.config.aliases.alias import Alias
from tgis.config.aliases.tgi import SHARED_SHORT_FLAG, TGI_NAMES
from tgis.config.aliases.tgis import TGIS_NAMES
from tgis.config.checks import DEFAULT, GivenAlias, Setting, apply_aliases, check
from tgis.config.option import Group, Option, declared, env_of, flag_of, in_groups
from tgis.config.processes import ProcessOptions
from tgis.errors import OperatorError
from tgis.process import json_lines

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=ProcessOptions)
Complete = Callable[[dict[str, Setting], dict[str, Any]], None]

ARGUMENTS = "tgis.arguments"  # key in click's context.meta for the original command line


class OneLine(click.Command):
    """Command that also prints usage errors as one line."""

    process = ""
    """Process name in JSON error lines; if empty, error lines are always text."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.ClickException as error:
            _fail(error.format_message(), _termination_log_of(error), _fields_of(error), error.exit_code)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)


class GroupedCommand(OneLine):
    """Command whose help lists its options by group."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each option under its group's heading; options without a group go under "Options"."""
        records: dict[Group | None, list[tuple[str, str]]] = {group: [] for group in (*Group, None)}
        for one in self.get_params(ctx):
            if record := one.get_help_record(ctx):
                records[getattr(one, "group", None)].append(record)
        for group, rows in records.items():
            if rows:
                with formatter.section(group.value if group else "Options"):
                    formatter.write_dl(rows)


class OneLineGroup(OneLine, click.Group):
    """Group of commands that prints usage errors as one line."""


def command(
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
    """Build a command whose options are the fields of `config_type` and the foreign names of `reads`.

    `reads` is a command's name in the tables of foreign names. `extra` lists parameters that are not fields;
    `complete` turns their values into settings. With `only_report` the command prints the settings and does
    not call `run`. `process` is the process name in JSON lines."""

    def call(**values: Any) -> None:
        context = click.get_current_context()
        fields = logs.process_fields(process, values) if process and values["json_output"] else None
        if fields:
            logs.setup("info", json_output=True, process=fields)
        with one_line_errors(values.get("termination_log"), fields):
            settings = {f.name: _setting(context, f, option) for f, option, _ in declared(config_type)}
            if complete:
                complete(settings, {one.name: values[one.name] for one in extra if one.name})
            notices = _read_foreign(context, settings, reads)
            if only_report:
                print(report.describe(settings))
                return
            run(_configure(config_type, settings, notices, fields))

    options = [
        parameter(f, option, hint, complete is None)
        for f, option, hint in in_groups(config_type)
        if option.flag
    ]
    theirs = [foreign_flag(one, hidden=one in TGI_NAMES) for one in _names_of(reads) if one.flag]
    made = GroupedCommand(
        name,
        callback=call,
        params=[*options, *extra, *theirs],
        help=help,
        context_settings={"show_default": True, "help_option_names": HELP_NAMES},
    )
    made.process = process
    return click.version_option(__version__, *VERSION_NAMES)(made)


@contextlib.contextmanager
def one_line_errors(
    termination_log: str | None = None, fields: Mapping[str, logs.Scalar] | None = None
) -> Iterator[None]:
    """If the block fails, end the process with one line on stderr and in the termination log.

    The line is JSON if `fields` are given."""
    try:
        yield
    except OperatorError as error:
        _fail(str(error), termination_log, fields)
    except click.ClickException:
        raise
    except Exception as error:
        logger.exception("unforeseen failure")
        _fail(f"{type(error).__name__}: {error}", termination_log, fields)


def _names_of(command_name: str) -> list[Alias]:
    return [one for one in (*TGIS_NAMES, *TGI_NAMES) if command_name in one.commands]


def _setting(context: click.Context, f: Field[Any], option: Option) -> Setting:
    if not option.flag:
        name = f.name.upper()
        text = os.environ.get(name, "").strip()
        return Setting(text, name) if text else Setting(f.default)
    value, source = context.params[f.name], context.get_parameter_source(f.name)
    if source is ParameterSource.COMMANDLINE:
        return Setting(value, flag_of(f))
    if source is not ParameterSource.ENVIRONMENT:
        return Setting(value)
    names = (env_of(f), option.older_env)
    return Setting(value, next(name for name in names if name and os.environ.get(name)))


def _read_foreign(context: click.Context, settings: dict[str, Setting], reads: str) -> list[str]:
    """Apply the foreign names that were given to the settings; return the warnings."""
    compat = settings["compat"].value if "compat" in settings else None
    if compat and _uses_short_flag(context.meta[ARGUMENTS]):
        raise click.UsageError(
            f"under --compat {compat}, write --grpc-port or --graceful-termination-timeout instead of "
            f"{SHARED_SHORT_FLAG}, which means one here and the other there",
            context,
        )
    given = [found for one in _names_of(reads) if (found := _given(context, one, compat))]
    parameters = {one.name: one for one in context.command.params}

    def read(name: str, text: str, source: str) -> Any:
        try:
            return parameters[name].type.convert(text, parameters[name], context)
        except click.BadParameter as error:
            if error.exit_code == 2:
                error.param_hint = source
            raise

    return apply_aliases(given, settings, read)


def _given(context: click.Context, foreign: Alias, compat: str | None) -> GivenAlias | None:
    """Return the value given for a foreign name, by its flag or else by its variable.

    Without --compat, a TGI flag is a usage error and TGI variables are ignored."""
    if (value := context.params.get(FOREIGN + foreign.name)) is not None:
        if foreign in TGI_NAMES and not compat:
            text = f"No such option: {foreign.flag_name}; it is TGI's: add --compat tgi to use TGI's names"
            raise click.UsageError(text, context)
        return GivenAlias(foreign, str(value).lower() if foreign.switch else value, foreign.flag_name)
    if not foreign.variable or (foreign in TGI_NAMES and not compat):
        return None
    text = os.environ.get(foreign.variable_name, "")
    is_given = text.strip() and not (foreign.switch and text == "false")
    return GivenAlias(foreign, text, foreign.variable_name) if is_given else None


def _uses_short_flag(arguments: Iterable[str]) -> bool:
    return any(one.startswith(SHARED_SHORT_FLAG) for one in arguments)


def _configure(
    config_type: type[C],
    settings: dict[str, Setting],
    notices: list[str],
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
    for text in [*filter(None, [notice]), *notices, *check(settings)]:
        logger.warning("%s", text)
    ours = [f.name for f, option, _ in declared(config_type) if option.flag]
    given = [
        f"{name}={report.shown(settings[name].value)}" for name in ours if settings[name].source != DEFAULT
    ]
    logger.log(
        logging.INFO if "env" in settings else logging.DEBUG, "settings: %s", " ".join(given) or "none"
    )
    return config


def _fail(
    text: str,
    termination_log: str | None = None,
    fields: Mapping[str, logs.Scalar] | None = None,
    exit_code: int = 1,
) -> NoReturn:
    line = " ".join(text.split())
    print(json_lines.error_line(line, fields), file=sys.stderr, flush=True)
    if termination_log:
        with contextlib.suppress(OSError):  # outside a cluster the file does not exist or is not writable
            Path(termination_log).write_text(line + "\n", encoding="utf-8", errors="backslashreplace")
    sys.exit(exit_code)


def _fields_of(error: click.ClickException) -> dict[str, logs.Scalar] | None:
    """Return the JSON fields if JSON lines were asked for, even if the options could not be read."""
    context = getattr(error, "ctx", None)
    if context is None or not isinstance(context.command, OneLine) or not context.command.process:
        return None
    is_asked = "--json-output" in context.meta.get(ARGUMENTS, ()) or os.environ.get("JSON_OUTPUT") == "true"
    return logs.process_fields(context.command.process, {}) if is_asked else None


def _termination_log_of(error: click.ClickException) -> str | None:
    """Return the termination log of a command whose options could not be read.

    The result is the option's value if it was read before the error, else its default. It is None if the
    command has no such option."""
    context = getattr(error, "ctx", None)
    options = {} if context is None else {p.name: p.default for p in context.command.params}
    log = options.get("termination_log")
    return str(context.params.get("termination_log") or log) if context and log else None
