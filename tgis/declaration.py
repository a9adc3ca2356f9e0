"""How an option is declared: as the field of a dataclass, from which flag, environment variable, type, range
and help follow."""

from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, get_type_hints


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
    minimum: float | None = None
    maximum: float | None = None
    refusal: str | None = None
    """What TGIS says of a number that is too small, `{value}` being the number; exit code 1 instead of 2."""
    unreadable: str | None = None
    """What TGIS says of a text that is no number; exit code 1 instead of 2."""
    takes_value: bool = False
    """A boolean that is written `--flag true`, as TGIS wants it for one of its flags."""


def option(help: str, default: Any = MISSING, **more: Any) -> Any:
    """A field that is an option; `more` are further fields of Option."""
    return field(default=default, metadata={"option": Option(help, **more)})


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
