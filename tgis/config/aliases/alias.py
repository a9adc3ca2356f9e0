"""Defines aliases: other servers' option names, which set an own option, have no effect, or are refused."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

# Reason shared by several servers' names.
OWN_KERNELS = "attention is always paged and unpadded, with the kernels of this service"


@dataclass(frozen=True)
class Alias:
    """Option name of another server. Its flag and variable are derived from it, as for the service's own."""

    name: str
    means: str | None = None
    """Own option that the value is for; if None, the name has no effect or is refused."""
    why: str = ""
    """For a name without effect, the reason, printed after `{name} has no effect: `; for a refused name, the
    alternative; for a name with `means`, a note on how its value is read."""
    refused: bool = False
    commands: tuple[str, ...] = ("launcher",)
    flag: bool = True
    short: str | None = None
    variable: bool = True
    switch: bool = False
    """True if the flag takes no value; a variable with the value `false` then counts as not given."""
    convert: Callable[[str], str] | None = None
    """Converter from the alias's value to the text of the own option; may raise ValueError."""
    also: tuple[tuple[str, object], ...] = ()
    """Further own options to set, with their values, unless they are given."""
    convert_more: Callable[[str], Mapping[str, str]] | None = None
    """Converter from the alias's value to the texts of further own options, by name; may raise ValueError."""
    replaces_into: str | None = None
    """Option that receives the value of `means` that this alias replaces, unless it is given itself; if None,
    two different values are an error."""
    refusal_of: Callable[[str], str | None] | None = None
    """Check of the value that returns an error message if the value is refused."""

    @property
    def flag_name(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable_name(self) -> str:
        return self.name.upper()
