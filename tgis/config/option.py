"""How an option is declared: as the field of a dataclass, from which flag, environment variable, type, range
and help follow."""

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

C = TypeVar("C", bound=type)


class Group(Enum):
    """Headings under which options are listed, in this order: what most people set comes first."""

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
    """What the command line needs to know of a field beside its name and type."""

    help: str
    env: bool | str = True
    """Whether the variable named after the field is read; a text names another variable."""
    older_env: str | None = None
    """A further variable, read where the first is not given."""
    flag: bool = True
    """Whether there is a flag; variables that belong to others have none, and are texts that may be unset."""
    short: str | None = None
    choices: tuple[str, ...] | None = None
    unlisted: tuple[str, ...] = ()
    """Further choices that are read, so that a check can refuse them, and are not offered."""
    advice: str = ""
    """What to do instead of a value that is no choice."""
    minimum: float | None = None
    maximum: float | None = None
    refusal: str | None = None
    """What TGIS says of a number that is too small, `{value}` being the number; exit code 1 instead of 2."""
    unreadable: str | None = None
    """What TGIS says of a text that is no number; exit code 1 instead of 2."""
    takes_value: bool = False
    """A boolean that is written `--flag true`, as TGIS wants it for one of its flags."""
    group: Group | None = None
    """None: that of the class that declares it, if it has one."""
    is_common: bool = False
    """Listed before the others of its group."""


def option(help: str, default: Any = MISSING, **more: Any) -> Any:
    """A field that is an option; `more` are further fields of Option."""
    return field(default=default, metadata={"option": Option(help, **more)})


def in_group(group: Group) -> Callable[[C], C]:
    """Put the options that a dataclass declares itself into `group`, but those that name another."""

    def decorate(config_type: C) -> C:
        for f in fields(config_type):
            option = f.metadata["option"]
            if f.name in config_type.__annotations__ and option.group is None:
                f.metadata = MappingProxyType({"option": replace(option, group=group)})
        return config_type

    return decorate


def in_groups(config_type: type) -> list[tuple[Field[Any], Option, Any]]:
    """Return what `declared` does, by groups, those without one last; of each group the common ones first."""
    order = [*Group, None]
    return sorted(declared(config_type), key=lambda one: (order.index(one[1].group), not one[1].is_common))


def declared(config_type: type) -> list[tuple[Field[Any], Option, Any]]:
    """Field, option and type of everything `config_type` declares, in order."""
    hints = get_type_hints(config_type)
    return [(f, f.metadata["option"], hints[f.name]) for f in fields(config_type)]


def flag_of(f: Field[Any]) -> str:
    """Of a field that has one."""
    return "--" + f.name.replace("_", "-")


def env_of(f: Field[Any]) -> str | None:
    name = f.metadata["option"].env
    return name if isinstance(name, str) else f.name.upper() if name else None


def variables_of(config_type: type) -> list[str]:
    """All the variables that give options of `config_type`."""
    found = [(env_of(f), option.older_env) for f, option, _ in declared(config_type)]
    return [name for names in found for name in names if name]


def to_flags(config: object) -> list[str]:
    """The command line that gives `config` again; unset options and those without a flag are left out."""
    flags: list[str] = []
    for f, opt, _ in declared(type(config)):
        value = getattr(config, f.name)
        if isinstance(value, bool) and not opt.takes_value:
            flags += [flag_of(f)] * value
        elif value is not None and opt.flag:
            flags += [flag_of(f), str(value).lower() if isinstance(value, bool) else str(value)]
    return flags
