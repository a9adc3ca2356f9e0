"""Generates `docs/configuration.md` from the declarations of the options."""

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field
from typing import Any

import click

from tgis.cli import main as cli
from tgis.cli.process_command import ALIAS
from tgis.config.aliases.alias import Alias
from tgis.config.aliases.tgis import PASSED_ON, TGIS_NAMES
from tgis.config.network import ProbeConfig
from tgis.config.option import Group, Option, declared, env_of, flag_of, in_groups
from tgis.config.processes import LauncherConfig, RouterConfig, ShardConfig
from tgis.router.api.tgi.options.names import TGI_NAMES

COMMANDS = {
    "launcher": ("text-generation-launcher", LauncherConfig),
    "router": ("text-generation-router", RouterConfig),
    "serve": ("text-generation-server serve", ShardConfig),
    "health-probe": ("health-probe", ProbeConfig),
}
INTRODUCTION = """\
# Configuration

This page lists every option with its flag, variable, default and range, and the names of other servers that are read.

- An option has a flag and a variable, of the same name in capitals; the flag wins. Exceptions are:
{exceptions}
- `text-generation-launcher --env` (`-e`) prints versions, machine and all settings with their sources, and then
  starts; `tgis env` prints the same and exits.
- `-h` or `--help` prints a command's options, `-V` or `--version` (`text-generation-launcher`,
  `text-generation-router`, `text-generation-server`, `tgis`) the version.
- Booleans in the environment are exactly `true` or `false`.
- A number without a stated maximum is at most 2147483647.
- A variable that is set but blank counts as not given if the option is a text that may be unset, or if the
  variable has no effect; otherwise it is an error that names the variable.
- `LOG_LEVEL` may also be a tracing filter (`info,text_generation_router=debug`); the nearest level is taken.
- The launcher starts the router and the shards, with flags that follow from its own options.

Exit codes: 0 after SIGTERM, SIGINT or SIGHUP; 1 after a failure; 2 after a usage error. Both say why in one
line, `error: …`, on stderr and, from the launcher, in the termination log.
"""
TGIS_MAPPED = """\
## TGIS's names for options of this service
"""
TGIS_WITHOUT_EFFECT = """\
## TGIS's names without effect

They are accepted, each with one line of warning, and have no effect.
"""
PASSED = """\
## Variables for libraries

The launcher passes them to its child processes unchanged.
"""
TGI = """\
## Names of Hugging Face TGI

The launcher reads them with `--compat tgi` (`COMPAT=tgi`) only; without it a flag that only TGI has is a
usage error. Names that TGI and this service share (`PORT`, `DTYPE`, …) are listed above and keep their
meaning; [Coming from TGI](migrating/tgi.md) lists the defaults that TGI's
names bring. A TGI name and ours with different values are an error. `-g` means `--grpc-port` here and
`--graceful-termination-timeout` in TGI: with `--compat tgi` write out one of these. `HOSTNAME` is never read,
because container engines set it to the container's name. `LORA_ADAPTERS` may have a revision only after a hub
id, and a request for an unknown adapter is refused, where TGI answers without the adapter.
"""
VLLM = """\
## Names of vLLM

The launcher reads them with `--compat vllm` (`COMPAT=vllm`) only: [Coming from vLLM](migrating/vllm.md) lists them.
"""
LMI = """\
## Names of LMI

The launcher reads them with `--compat lmi` (`COMPAT=lmi`) only: [Coming from LMI](migrating/lmi.md) lists them, and the
precedence of sources.
"""


def render() -> str:
    commands = [_command(name, *about) for name, about in COMMANDS.items()]
    tgis = [one for one in TGIS_NAMES if one.means], [one for one in TGIS_NAMES if not one.means]
    parts = [
        INTRODUCTION.format(exceptions="\n".join(_exceptions())),
        *commands,
        TGIS_MAPPED + "\n" + _foreign(tgis[0]),
        TGIS_WITHOUT_EFFECT + "\n" + _foreign(tgis[1]),
        PASSED + "\n" + table(("variable", "read by"), [(f"`{k}`", v) for k, v in PASSED_ON.items()]),
        TGI + "\n" + _foreign(TGI_NAMES),
        VLLM,
        LMI,
    ]
    return "\n".join(parts)


def _exceptions() -> Iterator[str]:
    """Yield, for each command, its options that lack a flag or the variable named after it."""
    for name, (program, config_type) in COMMANDS.items():
        options = [(f, option, env_of(f)) for f, option, _ in declared(config_type)]
        named = [
            (flag_of(f), env)
            for f, option, env in options
            if option.flag and env not in (None, f.name.upper())
        ]
        no_variable = [flag_of(f) for f, _, env in options if env is None]
        no_variable += [p.opts[0] for p in _extras(name, config_type) if isinstance(p, click.Option)]
        no_flag = [env for _, option, env in options if env and not option.flag]
        texts = [f"the variable of `{flag}` is `{env}`" for flag, env in named]
        texts += [f"without a variable: {code(no_variable)}"] * bool(no_variable)
        texts += [
            f"without a flag, as they are secret, have several lines or belong to others: {code(no_flag)}"
        ] * bool(no_flag)
        yield f"    - `{program}`: {'; '.join(texts)}."


def _extras(name: str, config_type: type) -> list[click.Parameter]:
    """Return the parameters that only the command line sets."""
    own = {f.name for f, _, _ in declared(config_type)} | {"version"}
    params = cli.main.commands[name].params
    return [p for p in params if p.name not in own and not (p.name or "").startswith(ALIAS)]


def _command(name: str, program: str, config_type: type) -> str:
    """Return a heading, and a table for each group of options."""
    tables: dict[Group | None, list[tuple[str, ...]]] = {group: [] for group in (None, *Group)}
    for f, option, _ in in_groups(config_type):
        tables[option.group].append(_row(f, option))
    for p in _extras(name, config_type):
        tables[getattr(p, "group", None)].append(_extra(p))
    parts = [f"## `{program}`\n"]
    for group, rows in tables.items():
        if rows:
            heading = f"### {group.value}\n\n" if group else ""
            parts.append(heading + table(("flag", "variable", "default", "meaning"), rows))
    return "\n".join(parts)


def _extra(parameter: click.Parameter) -> tuple[str, ...]:
    """Return the table of parameters that only the command line sets."""
    if isinstance(parameter, click.Argument):
        return f"`{parameter.human_readable_name.strip('[]')}`", "", "unset", "Positional, as in TGIS."
    assert isinstance(parameter, click.Option)
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    return names, "", _default(parameter.default), parameter.help or ""


def _row(f: Field[Any], option: Option) -> tuple[str, ...]:
    flags = [flag_of(f), *([option.short] if option.short else [])] if option.flag else []
    variables = [name for name in (env_of(f), option.older_env) if name]
    default = "required" if f.default is MISSING else _default(f.default)
    return code(flags), code(variables), default, option.help + _range(option)


def _default(value: object) -> str:
    return "unset" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _range(option: Option) -> str:
    if option.choices:
        return " One of " + code(option.choices) + "."
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("at least", option.minimum), ("at most", option.maximum))
        if bound is not None
    ]
    text = ", ".join(bounds)
    return f" {text[0].upper()}{text[1:]}." if text else ""


def _foreign(names: Iterable[Alias]) -> str:
    rows = [
        (
            code([one.flag_name, *([one.short] if one.short else [])] if one.flag else []),
            code([one.variable_name] if one.variable else []),
            ", ".join(one.commands),
            _meaning(one),
        )
        for one in names
    ]
    return table(("flag", "variable", "read by", "what it does"), rows)


def own_name(name: str) -> str:
    """Return the flag of the launcher's option, or its variable if it has no flag."""
    [field] = [f for f, _, _ in declared(LauncherConfig) if f.name == name]
    is_flag = field.metadata["option"].flag
    return f"`{flag_of(field) if is_flag else env_of(field)}`"


def _meaning(one: Alias) -> str:
    if one.means:
        return "means " + own_name(one.means) + (f"; {one.why}" if one.why else "")
    return ("refused: " if one.refused else "no effect: ") + one.why


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
