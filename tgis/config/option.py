"""Declares an option as a field of a dataclass, which gives its flag, variable, type, range and help."""

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

C = TypeVar("C", bound=type)

LARGEST = 2**31 - 1
"""Maximum of options that declare none: gRPC and the kernel use 32-bit integers."""


@dataclass(frozen=True)
class Secret:
    """Text that is never shown in logs, in errors or by `--env`."""

    text: str = field(repr=False)

    def __str__(self) -> str:
        return "(hidden)"


class Group(Enum):
    """Headings of the listed options, in the order in which they are shown."""

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
    """Properties of an option besides the field's name and type."""

    help: str
    env: bool | str = True
    """True to read the variable named after the field; a string names another variable."""
    older_env: str | None = None
    """Second variable, read if the first one is not set."""
    flag: bool = True
    """False for variables that belong to other programs; those are texts that may be unset."""
    short: str | None = None
    choices: tuple[str, ...] | None = None
    advice: str = ""
    """Advice added to the error for a value that is not among the choices."""
    minimum: float | None = None
    maximum: float | None = None
    """None for LARGEST."""
    refusal: str | None = None
    """TGIS's message for a number below the minimum, with the placeholder `{value}`; exit code 1, not 2."""
    unreadable: str | None = None
    """TGIS's message for a text that is not a number; exit code 1, not 2."""
    takes_value: bool = False
    """True for a boolean whose flag needs a value, `--flag true`, as one of TGIS's flags does."""
    group: Group | None = None
    """Group in which the option is listed; None for the group of the declaring class, if it has one."""
    is_common: bool = False
    """True to list the option before the others of its group."""


def option(help: str, default: Any = MISSING, **more: Any) -> Any:
    """Declare a dataclass field as an option; `more` are further fields of Option."""
    return field(default=default, metadata={"option": Option(help, **more)})


def in_group(group: Group) -> Callable[[C], C]:
    """Return a class decorator that sets the group of the options that the class declares without one."""

    def decorate(config_type: C) -> C:
        for f in fields(config_type):
            option = f.metadata["option"]
            if f.name in config_type.__annotations__ and option.group is None:
                f.metadata = MappingProxyType({"option": replace(option, group=group)})
        return config_type

    return decorate


def in_groups(config_type: type) -> list[tuple[Field[Any], Option, Any]]:
    """Return the result of `declared` by group, common options first. Options without a group are last."""
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
    pairs = [(env_of(f), option.older_env) for f, option, _ in declared(config_type)]
    return [name for pair in pairs for name in pair if name]


def to_flags(config: object) -> list[str]:
    """Return the command-line arguments for `config`, except for unset options and those without a flag."""
    flags: list[str] = []
    for f, opt, _ in declared(type(config)):
        value = getattr(config, f.name)
        if isinstance(value, bool) and not opt.takes_value:
            flags += [flag_of(f)] * value
        elif value is not None and opt.flag:
            flags += [flag_of(f), str(value).lower() if isinstance(value, bool) else str(value)]
    return flags
