"""Describes the option names of another server, which the launcher reads if `--compat` names the server."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tgis.config.aliases.alias import Alias
from tgis.config.checks import Setting


class PropertyOutcomes(Protocol):
    """Results of applying the names in a file of properties and in variables."""

    def describe(self) -> list[str]:
        """Return the lines of a report."""

    def to_notices(self, settings: Mapping[str, Setting]) -> list[tuple[int, str]]:
        """Return the lines to log, with their levels. Raises SettingsError for the first refused name."""


class PropertyReader(Protocol):
    """Reader of names that are keys of a file of properties instead of flags."""

    def forget_shared_names(self, settings: dict[str, Setting], defaults: Mapping[str, Any]) -> None:
        """Reset the options that were set by variables which the other server has too."""

    def apply(self, settings: dict[str, Setting], read: Callable[[str, str], Any]) -> PropertyOutcomes:
        """Set the options that the names mean, and those that follow from them. `read` converts a text to a
        value of the option of that name, and raises ValueError. Raises SettingsError."""


@dataclass(frozen=True)
class OptionNames:
    name: str
    """Value of `--compat`."""
    title: str
    aliases: tuple[Alias, ...]
    """The server's flags and variables."""
    model_flag: str
    """Flag, or key of a file, of the model, which must be given."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """The server's values of options of this service that are not given."""
    rewrite: Callable[[Sequence[str], Collection[str]], list[str]] | None = None
    """Rewrites a command line in the server's spelling, given the flags that take no value."""
    ambiguous_flags: Mapping[str, str] = field(default_factory=dict)
    """Short flags that mean different options in both services, with the flags to write instead."""
    properties: PropertyReader | None = None
