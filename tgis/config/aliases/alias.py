"""A name that is no option of ours but is read all the same: because it means one of ours, or to say why it
has no effect or cannot be served."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Foreign:
    """Flag and variable follow from the name, as for our own options."""

    name: str
    means: str | None = None
    """The option of ours that gets the value; without one it has no effect or is refused."""
    why: str = ""
    """Of one without effect: the reason, after `{name} has no effect: `; of a refused one: what to do; of one
    that means an option of ours: how its value is read."""
    refused: bool = False
    commands: tuple[str, ...] = ("launcher",)
    flag: bool = True
    short: str | None = None
    variable: bool = True
    switch: bool = False
    """The flag takes no value; a variable that says `false` counts as not given."""
    convert: Callable[[str], str] | None = None
    """From the foreign value to the text of ours; may raise ValueError."""
    refusal_of: Callable[[str], str | None] | None = None
    """Of a value without effect: what TGIS says where it is out of range."""

    @property
    def flag_name(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable_name(self) -> str:
        return self.name.upper()
