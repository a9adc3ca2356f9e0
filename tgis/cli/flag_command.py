"""Builds commands for a running service. Their options are fields of dataclasses, set by flags, and by the
variables that some declare."""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field
from types import NoneType
from typing import Any, get_args, get_origin

import click

from tgis.config.option import Option, declared, env_of, flag_of


def build_command(
    ask: Callable[..., None], help: str, kinds: Sequence[type], inputs: click.Argument | None = None
) -> click.Command:
    """Build a command that calls `ask` with one of each of `kinds`, set by options, and with the inputs."""

    def run(**values: Any) -> None:
        filled = [kind(**{f.name: values[f.name] for f, _, _ in declared(kind)}) for kind in kinds]
        ask(*filled, *([values["inputs"]] if inputs else []))

    options = [_click_option(*declaration) for kind in kinds for declaration in declared(kind)]
    params: list[click.Parameter] = [inputs, *options] if inputs else [*options]
    return click.Command(ask.__name__, params=params, callback=run, help=help)


def _click_option(f: Field[Any], declaration: Option, hint: Any) -> click.Option:
    base = next((kind for kind in get_args(hint) if kind is not NoneType), hint)
    return click.Option(
        [flag_of(f), f.name],
        type=_click_type(base, declaration),
        default=None if f.default is MISSING else f.default,
        is_flag=hint is bool,
        multiple=get_origin(hint) is tuple,
        envvar=env_of(f),
        show_envvar=True,
        help=declaration.help,
        show_default=f.default not in (None, False, ()),
    )


def _click_type(base: Any, declaration: Option) -> Any:
    low, high = declaration.minimum, declaration.maximum
    if base is int and low is not None:
        return click.IntRange(int(low), None if high is None else int(high))
    return click.FloatRange(low, high) if base is float and low is not None else base
