"""Builds commands whose options are the fields of configuration classes, set by flags and variables.

Options are validated as strictly as in TGIS. A failure prints one line, `error: ...`. The exit code is 2 for
a usage error, and 1 for a value refused with TGIS's own message and for any other error."""

import contextlib
import logging
import math
import os
import signal
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field
from pathlib import Path
from types import FrameType, NoneType
from typing import Any, NoReturn, get_args, get_origin

import click

from tgis import logs
from tgis.config import log_level
from tgis.config.option import LARGEST, Group, Option, declared, env_of, flag_of, in_groups
from tgis.errors import OperatorError
from tgis.process import json_lines

logger = logging.getLogger(__name__)

ARGUMENTS = "tgis.arguments"  # key in click's context.meta for the original command line
SETTINGS = {"show_default": True, "help_option_names": ["-h", "--help"]}  # TGIS's names of the help option
INTERRUPTED = 128 + signal.SIGINT  # as shells report it
VERSION_NAMES = ("-V", "--version")  # TGIS's


class _OneLine(click.Command):
    """Command that prints usage errors as one line."""

    process = ""
    """Process name in JSON error lines; if empty, error lines are always text."""
    usage_exit_code: int | None = None
    """Exit code of every usage error; None: 2, or 1 for a value refused with TGIS's own message."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.context_settings = {**SETTINGS, **self.context_settings}

    def main(self, *args: Any, **more: Any) -> Any:
        try:
            return super().main(*args, **{**more, "standalone_mode": False})
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            # Not all options may have been parsed, so none are passed.
            _fail(error.format_message(), context, {}, self.usage_exit_code or error.exit_code)
        except click.Abort:  # Ctrl-C before a command runs
            sys.exit(INTERRUPTED)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)


class CommandTable(UserDict[str, Any]):
    """Commands by name. A value may be a function that imports and returns the command, so that a process
    does not import the other commands."""

    def __getitem__(self, name: str) -> click.Command:
        entry = super().__getitem__(name)
        command: click.Command = entry if isinstance(entry, click.Command) else entry()
        self[name] = command
        return command


class OneLineGroup(_OneLine, click.Group):
    """Group of commands that prints usage errors as one line."""


class OneLineCommand(_OneLine):
    """Command that prints every error as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException:
            raise
        except OperatorError as error:
            _fail(str(error), ctx, ctx.params)
        except KeyboardInterrupt as error:
            _fail(f"interrupted by {str(error) or 'SIGINT'}", ctx, ctx.params)
        except Exception as error:
            logger.exception("unexpected failure")
            _fail(f"{type(error).__name__}: {error}", ctx, ctx.params)


class FileCommand(OneLineCommand):
    """Command that reads or writes files. A signal ends it with an error line, a second one kills it."""

    def invoke(self, ctx: click.Context) -> Any:
        logs.setup("info", json_output=False)
        with _signals_raised():
            return super().invoke(ctx)


def command(
    name: str,
    run: Callable[..., None],
    help: str,
    *config_types: type,
    extra: Sequence[click.Parameter] = (),
) -> OneLineCommand:
    """Build a command whose options are the fields of `config_types`, plus the `extra` parameters.

    It calls `run` with an instance of each type, and with the extra values as keyword arguments."""

    options = _options_of(config_types)
    return OneLineCommand(
        name, callback=_with_configs(run, config_types), params=[*extra, *options], help=help
    )


class RunnableGroup(OneLineCommand, click.Group):
    """Group that is also a command: without a subcommand, it runs itself."""

    def __init__(
        self,
        name: str,
        run: Callable[..., None],
        help: str,
        config_types: Sequence[type],
        commands: Sequence[click.Command],
    ) -> None:
        call = _with_configs(run, config_types)

        @click.pass_context
        def call_alone(context: click.Context, /, **values: Any) -> None:
            if context.invoked_subcommand is None:
                call(**values)

        super().__init__(
            name,
            callback=call_alone,
            params=_options_of(config_types),
            help=help,
            commands=commands,
            invoke_without_command=True,
        )


def _options_of(config_types: Sequence[type]) -> list[click.Parameter]:
    return [one for kind in config_types for one in parameters(kind)]


def _with_configs(run: Callable[..., None], config_types: Sequence[type]) -> Callable[..., None]:
    """Return a callback that calls `run` with an instance of each type, and with the other values."""

    def call(**values: Any) -> None:
        configs = [
            kind(**{f.name: values.pop(f.name) for f, _, _ in declared(kind)}) for kind in config_types
        ]
        run(*configs, **values)

    return call


def parameters(config_type: type, is_required: bool = False) -> list[click.Parameter]:
    """Build a configuration class's options, by group.

    `is_required` makes options without a default mandatory."""
    return [_parameter(*one, is_required) for one in in_groups(config_type) if one[1].flag]


def json_fields(context: click.Context | None, options: Mapping[str, Any]) -> dict[str, logs.Scalar] | None:
    """Return the fields of the process's JSON lines, or None if its lines are text.

    It reads the raw command line and environment, so it works even if parsing them fails."""
    process = getattr(context.command, "process", "") if context else ""
    if context is None or not process:
        return None
    is_asked = "--json-output" in context.meta.get(ARGUMENTS, ()) or os.environ.get("JSON_OUTPUT") == "true"
    return logs.process_fields(process, options) if is_asked else None


def _fail(
    text: str, context: click.Context | None, options: Mapping[str, Any], exit_code: int = 1
) -> NoReturn:
    """Exit with one line on stderr and in the command's termination log, if it has one."""
    line = " ".join(text.split())
    print(json_lines.error_line(line, json_fields(context, options)), file=sys.stderr, flush=True)
    defaults = {p.name: p.default for p in context.command.params} if context else {}
    if context and (log := context.params.get("termination_log", defaults.get("termination_log"))):
        with contextlib.suppress(OSError):  # outside a cluster the file does not exist or is not writable
            Path(log).write_text(line + "\n", encoding="utf-8", errors="backslashreplace")
    sys.exit(exit_code)


@contextlib.contextmanager
def _signals_raised() -> Iterator[None]:
    """Raise KeyboardInterrupt with the signal's name for the first SIGINT or SIGTERM inside the block."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for one in handlers:
            signal.signal(one, signal.SIG_DFL)
        raise KeyboardInterrupt(signal.Signals(number).name)

    handlers = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class _RefusedValue(click.BadParameter):
    """Usage error for a value whose option declares TGIS's message."""

    exit_code = 1

    def format_message(self) -> str:
        return self.message


class GroupedOption(click.Option):
    """Option that `--help` lists under its group's heading."""

    def __init__(self, *args: Any, group: Group | None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.group = group


def _parameter(f: Field[Any], option: Option, hint: Any, is_required: bool) -> click.Option:
    is_flag = hint is bool and not option.takes_value
    has_default = f.default is not MISSING
    may_lack_value: dict[str, Any] = {"flag_value": "true"} if option.takes_value else {}
    return _Declared(
        [flag_of(f), f.name, *([option.short] if option.short else [])],
        type=None if is_flag else _type_of(f.name, option, hint),
        is_flag=is_flag,
        multiple=get_origin(hint) is tuple,
        **may_lack_value,
        required=is_required and not has_default,
        default=f.default if has_default else None,
        envvar=[name for name in (env_of(f), option.older_env) if name],
        show_envvar=True,
        is_eager=f.name == "termination_log",  # read first, so errors in other options can be written to it
        help=option.help,
        group=option.group,
    )


class _Declared(GroupedOption):
    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the value of the first variable that is set.

        A blank variable counts as unset for an optional text, and is an error for other types."""
        assert isinstance(self.envvar, list), "variables are declared as a list"
        may_be_blank = self.default is None and isinstance(
            self.type, click.types.StringParamType | click.Choice
        )
        for name in self.envvar:
            text = os.environ.get(name)
            if text is None or (may_be_blank and not text.strip()):
                continue
            if not text.strip() and not isinstance(self.type, _Int):
                self.type.fail("it is set to an empty value.", self, ctx)
            if isinstance(self.type, click.types.BoolParamType) and text not in ("true", "false"):
                self.type.fail(f"{text!r} is neither true nor false.", self, ctx)
            return text
        return None


def _type_of(name: str, option: Option, hint: Any) -> click.ParamType[Any]:
    kind = next((part for part in get_args(hint) if part is not NoneType), hint)
    if name == "log_level":
        return _Level()
    if option.choices:
        return _ChoiceType(option)
    if kind is int:
        return _Int(option)
    if kind is float and option.minimum is not None:
        return _Float(option.minimum, option.maximum)
    return {float: click.FLOAT, bool: click.BOOL}.get(kind, click.STRING)


class _ChoiceType(click.Choice[str]):
    def __init__(self, option: Option) -> None:
        super().__init__(option.choices or ())
        self._option = option

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            text = f"{error.message} {self._option.advice}".rstrip()
            raise click.BadParameter(text, error.ctx, error.param) from error


class _Int(click.IntRange):
    def __init__(self, option: Option) -> None:
        super().__init__(_whole(option.minimum), _whole(option.maximum))
        self._option = option

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = _or_refuse(self._option.unreadable, lambda: click.INT.convert(value, param, ctx))
        is_small = self.min is not None and number < self.min
        refusal = self._option.refusal.format(value=number) if is_small and self._option.refusal else None
        number = _or_refuse(refusal, lambda: super(_Int, self).convert(number, param, ctx))
        if self.max is None and number > LARGEST:
            self.fail(f"{number} is more than {LARGEST}.", param, ctx)
        return number


class _Float(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        if self.max is None and number > LARGEST:
            self.fail(f"{value} is more than {LARGEST}.", param, ctx)
        return number


class _Level(click.ParamType[str]):
    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            log_level.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


def _whole(bound: float | None) -> int | None:
    return None if bound is None else int(bound)


def _or_refuse(refusal: str | None, convert: Callable[[], Any]) -> Any:
    """Return the result of `convert`. If it fails and `refusal` is given, raise that message, not click's."""
    try:
        return convert()
    except click.BadParameter as error:
        if refusal is None:
            raise
        raise _RefusedValue(refusal, error.ctx, error.param) from error
