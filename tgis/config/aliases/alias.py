"""Describes another server's option name: it means one of the service's own, has no effect, or is refused."""

from collections.abc import Callable
from dataclasses import dataclass

# Reason that the names of both servers share.
OWN_KERNELS = "attention is always paged and unpadded, with the kernels of this service"


@dataclass(frozen=True)
class Alias:
    """Option name of another server; its flag and variable follow from the name, as for the service's own."""

    name: str
    means: str | None = None
    """Name of the service's own option that gets the value; if None, the name has no effect or is refused."""
    why: str = ""
    """For a name without effect, the reason, printed after `{name} has no effect: `; for a refused name, what
    to do; for a name with `means`, how its value is read."""
    refused: bool = False
    commands: tuple[str, ...] = ("launcher",)
    flag: bool = True
    short: str | None = None
    variable: bool = True
    switch: bool = False
    """True if the flag takes no value; a variable with the value `false` then counts as not given."""
    convert: Callable[[str], str] | None = None
    """Converter from the foreign value to the text of the service's own option; may raise ValueError."""
    also: tuple[tuple[str, object], ...] = ()
    """Further options of the service with the values that they get unless they are given."""
    replaces_into: str | None = None
    """Option that gets the value that this one's value replaces, unless it is given; None: two different
    values are an error."""
    refusal_of: Callable[[str], str | None] | None = None
    """Check of the value: returns TGIS's message if it is out of range."""

    @property
    def flag_name(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable_name(self) -> str:
        return self.name.upper()
