"""Declares an option as a field of a dataclass, which gives its flag, variable, type, range and help."""

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

C = TypeVar("C", bound=type)

LARGEST = 2**31 - 1
"""Largest number for options that declare no maximum: gRPC and the kernel take 32-bit integers."""


@dataclass(frozen=True)
class Secret:
    """Text that neither logs nor errors nor `--env` show."""

    text: str = field(repr=False)

    def __str__(self) -> str:
        return "(hidden)"


class Group(Enum):
    """Headings for listed options, in this order: the options that most people set come first."""

    MODEL = "Model"
    LIMITS = "Limits of requests"
    NETWORK = "Network"
    TLS = "TLS and tokens"
    MEMORY = "Memory and speed"
    ADAPTERS = "Soft prompts and adapters"
    LOGS = "Logs and traces"
    LIFECYCLE = "Start, stop and recovery"
    NODES = "Several machines"
    COMPATIBILITY = "Compatibility"


@dataclass(frozen=True)
class Option:
    """Properties of an option that a field's name and type do not give."""

    help: str
    env: bool | str = True
    """True to read the variable named after the field; a string names another variable."""
    older_env: str | None = None
    """Second variable, read if the first is not given."""
    flag: bool = True
    """True if the option has a flag; False for variables of other programs, texts that may be unset."""
    short: str | None = None
    choices: tuple[str, ...] | None = None
    advice: str = ""
    """What to do instead of a value that is no choice."""
    minimum: float | None = None
    maximum: float | None = None
    """None for LARGEST."""
    refusal: str | None = None
    """TGIS's message for a number below the minimum, with `{value}` for it; the exit code is 1, not 2."""
    unreadable: str | None = None
    """TGIS's message for a text that is not a number; the exit code is 1, not 2."""
    takes_value: bool = False
    """True for a boolean that is written `--flag true`, as TGIS does for one of its flags."""
    group: Group | None = None
    """Group that lists the option; None for the group of the class that declares it, if it has one."""
    is_common: bool = False
    """True to list the option before the others of its group."""


def option(help: str, default: Any = MISSING, **more: Any) -> Any:
    """Declare a field that is an option; `more` are further fields of Option."""
    return field(default=default, metadata={"option": Option(help, **more)})


def in_group(group: Group) -> Callable[[C], C]:
    """Put the options that a dataclass itself declares into `group`, except those that name another."""

    def decorate(config_type: C) -> C:
        for f in fields(config_type):
            option = f.metadata["option"]
            if f.name in config_type.__annotations__ and option.group is None:
                f.metadata = MappingProxyType({"option": replace(option, group=group)})
        return config_type

    return decorate


def in_groups(config_type: type) -> list[tuple[Field[Any], Option, Any]]:
    """Return the result of `declared` by group, common options first; options without a group are last."""
    order = [*Group, None]
    return sorted(declared(config_type), key=lambda one: (order.index(one[1].group), not one[1].is_common))


def declared(config_type: type) -> list[tuple[Field[Any], Option, Any]]:
    """Return the field, option and type of each option of `config_type`, in order."""
    hints = get_type_hints(config_type)
    return [(f, f.metadata["option"], hints[f.name]) for f in fields(config_type)]


def flag_of(f: Field[Any]) -> str:
    return "--" + f.name.replace("_", "-")


def env_of(f: Field[Any]) -> str | None:
    name = f.metadata["option"].env
    return name if isinstance(name, str) else f.name.upper() if name else None


def variables_of(config_type: type) -> list[str]:
    found = [(env_of(f), option.older_env) for f, option, _ in declared(config_type)]
    return [name for names in found for name in names if name]


def to_flags(config: object) -> list[str]:
    """Return the arguments that reproduce `config`, without unset options and options without a flag."""
    flags: list[str] = []
    for f, opt, _ in declared(type(config)):
        value = getattr(config, f.name)
        if isinstance(value, bool) and not opt.takes_value:
            flags += [flag_of(f)] * value
        elif value is not None and opt.flag:
            flags += [flag_of(f), str(value).lower() if isinstance(value, bool) else str(value)]
    return flags
