"""Rules for whole answers: reasoning with a limit, tool calls, and the constraint on the rest."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

FREE = "free"
"""Kind of a constraint that allows any text."""


class Mark(NamedTuple):
    """Text that delimits parts of an answer."""

    text: str
    token_id: int | None = None
    """Token for the whole mark; None if the tokenizer has none."""
    is_special: bool = False
    """True if that token is special."""


@dataclass(frozen=True)
class ReasoningRule:
    """Reasoning before the rest of the answer."""

    begin: Mark | None
    """Mark that begins optional reasoning; None if the prompt has begun the reasoning."""
    end: Mark
    max_tokens: int | None = None
    """Number of tokens after which `end` is forced; None for no limit. A limit requires marks that are
    tokens. After a `begin` that is not special, `end` may be forced one token earlier."""


class Tags(NamedTuple):
    """Texts around the key and the value of each argument, for calls that are not JSON."""

    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    text_key_end: str
    """Text after the key of a value that is a text."""


class Notation(NamedTuple):
    """Notation of arguments that is not JSON."""

    key_end: str
    """Text between a key and its value."""
    separator: str
    constants: tuple[str, str, str]
    """Texts of the constants true, false and null."""
    quote: str = ""
    """Mark before and after each text; empty if texts, lists and objects are JSON."""


class CallRule(NamedTuple):
    """Rule for calls of one function: `head`, arguments that match the JSON schema, and `tail`."""

    head: str
    schema: str
    tail: str
    is_strict: bool
    """False if unsupported parts of the schema are ignored."""
    field: str
    """Request field of the schema, for example `tools[0].function.parameters`."""
    tags: Tags | None = None
    notation: Notation | None = None
    """Without tags and a notation, the arguments are a JSON object."""


@dataclass(frozen=True)
class CallRules:
    """Calls of functions, in the model's own format."""

    trigger: Mark | None
    """Mark that begins the calls, or each call if `begins_each`; None if calls begin with a `head`."""
    begins_each: bool
    begin: str
    """Text between a trigger and the head that follows it; without a trigger, text before the first head."""
    between: str
    """Text between a tail and the next head; the trigger comes after it if `begins_each`."""
    end: str
    """Text after the last tail."""
    functions: tuple[CallRule, ...]
    is_required: bool
    """True if the answer must consist of calls; False if it may be a text, optionally followed by calls."""
    allows_several: bool
    marks: tuple[Mark, ...] = ()
    """Marks within the texts above that are single tokens."""
    optional_mark: Mark | None = None
    """Optional mark before the first head, if there is no trigger."""


@dataclass(frozen=True)
class MessageRules:
    """Messages in channels, of which the answer consists. Reasoning and calls are messages."""

    start: Mark
    channel: Mark
    constrain: Mark
    message: Mark
    end: Mark
    role: str
    reasoning_channel: str
    calls_channel: str
    """Also of comments for the user."""
    content_channel: str
    opened: Literal["header", "reasoning", "content"] = "header"
    """Part of a message to which the end of the prompt belongs."""


@dataclass(frozen=True)
class AnswerRules:
    reasoning: ReasoningRule | None = None
    calls: CallRules | None = None
    messages: MessageRules | None = None
    """None if the answer is a text."""
