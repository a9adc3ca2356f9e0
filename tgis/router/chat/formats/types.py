"""Form of a description of how a kind of model writes calls of tools, and reasoning."""

from dataclasses import dataclass

Parts = tuple[str, ...]
"""Texts that follow each other. A model may write white space before and after each of them."""


@dataclass(frozen=True)
class ReasoningFormat:
    """Reasoning comes first in an answer, between two marks."""

    name: str
    begin: str
    """Mark before the reasoning. Some templates write it, and then it ends the prompt."""
    end: str
    in_template: Parts
    """Texts that a template has if its model writes in this format."""


@dataclass(frozen=True)
class JsonCall:
    """A call is a JSON object of the function's name and its arguments."""

    name_key: str = "name"
    arguments_key: str = "arguments"


@dataclass(frozen=True)
class NamedCall:
    """A call is the function's name, a separator and the arguments as a JSON object."""

    separator: Parts


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
    optional_mark: str = ""
    """Mark that may come before the calls. Only a format without parts before its calls has one; the calls
    are then the whole answer."""
