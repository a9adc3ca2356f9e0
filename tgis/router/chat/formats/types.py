"""Form of a description of how a kind of model writes calls of tools, and reasoning."""

from dataclasses import dataclass

Parts = tuple[str, ...]
"""Texts that follow each other, with the white space that the model writes around them, which the grammar of
answers demands. Readers ignore it: they allow any white space before and after each text."""


@dataclass(frozen=True)
class ReasoningFormat:
    """Reasoning comes first in an answer, between two marks."""

    name: str
    begin: str
    """Mark before the reasoning. Some templates write it, and then it ends the prompt."""
    end: str
    in_template: Parts
    """Texts that a template has if its model writes in this format."""
    other_names: tuple[str, ...] = ()
    """Names that other servers have for this format."""


@dataclass(frozen=True)
class JsonCall:
    """A call is a JSON object of the function's name and its arguments."""

    name_key: str = "name"
    arguments_key: str = "arguments"


@dataclass(frozen=True)
class NamedCall:
    """A call is the function's name, a separator and the arguments as a JSON object."""

    separator: str
    id_mark: str = ""
    """Mark with an id of the call that models may write between the name and the separator."""


@dataclass(frozen=True)
class ToolFormat:
    """Calls come last in an answer: `section[0]`, calls with `between` between each two, `section[1]`. Each
    call is `call[0]`, its body, `call[1]`. The first part before a call or a section, if there is one, ends
    the text before the calls."""

    name: str
    body: JsonCall | NamedCall
    in_template: Parts
    """Texts that a template has if its model writes in this format."""
    section: tuple[Parts, Parts] = ((), ())
    call: tuple[Parts, Parts] = ((), ())
    between: str = ""
    has_short_ids: bool = False
    """True if the template demands ids of calls that are 9 letters and digits."""
    optional_mark: str = ""
    """Mark that may come before the calls. Only a format without parts before its calls has one; the calls
    are then the whole answer."""
    other_names: tuple[str, ...] = ()
    """Names that other servers have for this format."""

    @property
    def trigger(self) -> str | None:
        """Mark that ends the text before the calls; None if calls begin the answer."""
        parts = (*self.section[0], *self.call[0])
        return parts[0].strip() if parts else None

    @property
    def has_end(self) -> bool:
        """True if a mark ends the calls, so that text after them can be told from them."""
        return bool(self.section[1] or self.call[1])
