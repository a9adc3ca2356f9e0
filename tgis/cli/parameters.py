"""Converts a declared option to a click parameter, with types, ranges and variables as strict as in TGIS.

A refusal with TGIS's own text exits with 1, any other usage error with 2."""

import math
import os
from collections.abc import Callable
from dataclasses import MISSING, Field
from types import NoneType
from typing import Any, get_args

import click

from tgis.config import log_level
from tgis.config.aliases.alias import Alias
from tgis.config.option import Group, Option, env_of, flag_of

FOREIGN = "foreign_"  # prefix of the parameter names of foreign options
HELP_NAMES = ["-h", "--help"]  # TGIS's; commands below a group inherit them
VERSION_NAMES = ("-V", "--version")


class Refusal(click.BadParameter):
    """Usage error for a value whose option declares its own refusal text."""

    exit_code = 1

    def format_message(self) -> str:
        return self.message


def parameter(f: Field[Any], option: Option, hint: Any, is_required: bool) -> click.Option:
    """Build the click option of a configuration's field.

    `is_required` is True if only this parameter can set a field without a default."""
    is_flag = hint is bool and not option.takes_value
    has_default = f.default is not MISSING
    may_lack_value: dict[str, Any] = {"flag_value": "true"} if option.takes_value else {}
    return _Declared(
        [flag_of(f), f.name, *([option.short] if option.short else [])],
        type=None if is_flag else _type_of(f.name, option, hint),
        is_flag=is_flag,
        **may_lack_value,
        required=is_required and not has_default,
        default=f.default if has_default else None,
        envvar=[name for name in (env_of(f), option.older_env) if name],
        show_envvar=True,
        is_eager=f.name == "termination_log",  # read first, so errors in other options can be written to it
        help=option.help,
        group=option.group,
    )


def foreign_flag(foreign: Alias, hidden: bool) -> click.Option:
    help = f"Means --{foreign.means.replace('_', '-')}." if foreign.means else f"No effect: {foreign.why}."
    names = [foreign.flag_name, FOREIGN + foreign.name, *([foreign.short] if foreign.short else [])]
    switch, group = foreign.switch, Group.COMPATIBILITY
    return GroupedOption(names, is_flag=switch, default=None, hidden=hidden, help=help, group=group)


class GroupedOption(click.Option):
    """Option that `--help` lists under its group's heading."""

    def __init__(self, *args: Any, group: Group | None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.group = group


class _Declared(GroupedOption):
    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the value of the first variable that is given.

        A blank variable counts as not given if the option is a text and may be unset; otherwise it is an
        error."""
        assert isinstance(self.envvar, list), "variables are declared as a list"
        may_be_blank = self.default is None and isinstance(
            self.type, click.types.StringParamType | click.Choice
        )
        for name in self.envvar:
            text = os.environ.get(name)
            if text is None or (may_be_blank and not text.strip()):
                continue
            if not text.strip() and not isinstance(self.type, _Int):
                self.type.fail("it is set to nothing.", self, ctx)
            if isinstance(self.type, click.types.BoolParamType) and text not in ("true", "false"):
                self.type.fail(f"{text!r} is neither true nor false.", self, ctx)
            return text
        return None


def _type_of(name: str, option: Option, hint: Any) -> click.ParamType[Any]:
    kind = next((part for part in get_args(hint) if part is not NoneType), hint)
    if name == "log_level":
        return _Level()
    if option.choices:
        return _Choice(option)
    if kind is int:
        return _Int(option)
    if kind is float:
        return _Float(option.minimum, option.maximum)
    return click.BOOL if kind is bool else click.STRING


class _Choice(click.Choice[str]):
    def __init__(self, option: Option) -> None:
        super().__init__(option.choices or ())
        self._option = option

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in self._option.unlisted:
            return str(value)
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
        refusal = self._option.refusal and self._option.refusal.format(value=number)
        return _or_refuse(refusal, lambda: super(_Int, self).convert(number, param, ctx))


class _Float(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
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
    """Return the result of `convert`; if it fails, raise the refusal's text instead of click's, if given."""
    try:
        return convert()
    except click.BadParameter as error:
        if refusal is None:
            raise
        raise Refusal(refusal, error.ctx, error.param) from error
