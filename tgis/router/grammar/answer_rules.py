"""Rules for whole answers: reasoning with a limit, calls of tools, and the constraint on the rest."""

from dataclasses import dataclass
from typing import NamedTuple

FREE = "free"
"""Kind of a constraint that lets the text of an answer be any."""


class Mark(NamedTuple):
    """Text that separates parts of an answer."""

    text: str
    token_id: int | None = None
    """Token that is the whole mark; None if the tokenizer has none."""
    is_special: bool = False
    """True if the tokenizer calls that token special."""


@dataclass(frozen=True)
class ReasoningRule:
    """Reasoning before the rest of the answer."""

    begin: Mark | None
    """Mark with which the model may begin to reason; None if the prompt has begun the reasoning."""
    end: Mark
    max_tokens: int | None = None
    """Number of tokens after which `end` is forced; None for no limit. It needs marks that are tokens. After
    a `begin` that is not special, `end` may be forced one token earlier."""


class CallRule(NamedTuple):
    """One function: its call is `head`, arguments that match the JSON schema, and `tail`."""

    head: str
    schema: str
    tail: str
    is_strict: bool
    """False if what the grammar library does not support of the schema is left out."""
    field: str
    """Field of the request that has the schema, for example `tools[0].function.parameters`."""


@dataclass(frozen=True)
class CallRules:
    """Calls of functions, in the model's own format."""

    trigger: Mark | None
    """What begins the calls, or each of them if `begins_each`; None if calls begin with a `head`."""
    begins_each: bool
    begin: str
    """Text between a trigger and the head that follows it."""
    between: str
    """Text between a tail and the next head; the trigger comes after it if `begins_each`."""
    end: str
    """Text after the last tail."""
    functions: tuple[CallRule, ...]
    is_required: bool
    """True if the answer is calls only; False if it may be a text, which calls may follow."""
    allows_several: bool
    marks: tuple[Mark, ...] = ()
    """Marks within the texts above that are tokens of their own."""
    optional_mark: Mark | None = None
    """Mark that may come before the first head, where there is no trigger."""


@dataclass(frozen=True)
class AnswerRules:
    reasoning: ReasoningRule | None = None
    calls: CallRules | None = None
