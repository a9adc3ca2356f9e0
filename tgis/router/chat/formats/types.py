"""Types that describe how a kind of model writes tool calls and reasoning."""

from dataclasses import dataclass

Parts = tuple[str, ...]
"""Consecutive texts with the model's white space around them. The grammar requires this white space; parsers
allow any white space around each text."""


@dataclass(frozen=True)
class ReasoningFormat:
    """Format of reasoning, which comes first in an answer, between two marks."""

    name: str
    begin: str
    """Mark before the reasoning. Some templates write it at the end of the prompt."""
    end: str
    in_template: Parts
    """Texts in the template by which this format is detected."""
    other_names: tuple[str, ...] = ()
    """Names of this format in other servers."""
    is_channel: bool = False
    """True if answers are messages in channels (`formats/harmony.py`)."""
    label: str = ""
    """Text that models write after the mark, which is not reasoning."""


@dataclass(frozen=True)
class JsonCall:
    """Call that is a JSON object with the function's name and its arguments."""

    name_key: str = "name"
    arguments_key: str = "arguments"


@dataclass(frozen=True)
class NamedCall:
    """Call that is the function's name, a separator and the arguments as a JSON object."""

    separator: str
    id_mark: str = ""
    """Mark before an optional call id between the name and the separator."""


@dataclass(frozen=True)
class LooseCall:
    """Call that is the function's name and the arguments as an object with bare keys, whose texts are between
    two quotes. Parsers also accept JSON."""

    quote: str


@dataclass(frozen=True)
class PythonCall:
    """Call that is written like a call in Python, with keywords for all arguments."""


@dataclass(frozen=True)
class TaggedCall:
    """Call that is the function's name and its arguments between tags: `key_begin`, the key, `key_end`,
    `value_begin`, the value, `value_end`. A value is JSON, or a text that is not quoted."""

    name_end: str
    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    text_key_end: str = ""
    """Text after the key of a value that is a text; empty if it is `key_end`."""


@dataclass(frozen=True)
class ChannelCall:
    """Call that is a message in a channel: the header has the function's name, and the arguments follow as a
    JSON object."""


@dataclass(frozen=True)
class ToolFormat:
    """Format of calls, which come last in an answer: `section[0]`, calls separated by `between`,
    `section[1]`. Each call is `call[0]`, its body, `call[1]`. The first part of the section or call, if any,
    ends the text before the calls, unless calls are the whole answer."""

    name: str
    body: JsonCall | NamedCall | LooseCall | PythonCall | TaggedCall | ChannelCall
    in_template: Parts
    """Texts in the template by which this format is detected."""
    section: tuple[Parts, Parts] = ((), ())
    call: tuple[Parts, Parts] = ((), ())
    between: str = ""
    has_short_ids: bool = False
    """True if the template requires call ids of 9 letters and digits."""
    optional_mark: str = ""
    """Optional mark before the calls, for formats whose calls are the whole answer: those without parts
    before their calls, and those with `is_whole_answer`."""
    is_whole_answer: bool = False
    """True if text before the parts makes the answer a text."""
    other_names: tuple[str, ...] = ()
    """Names of this format in other servers."""

    @property
    def trigger(self) -> str | None:
        """Mark that ends the text before the calls; None if calls begin the answer."""
        parts = (*self.section[0], *self.call[0])
        return parts[0].strip() if parts and not self.is_whole_answer else None

    @property
    def is_channel(self) -> bool:
        """True if answers are messages in channels (`formats/harmony.py`)."""
        return isinstance(self.body, ChannelCall)

    @property
    def has_end(self) -> bool:
        """True if a mark ends the calls, so that text after them can be recognized."""
        return bool(self.section[1] or self.call[1])
