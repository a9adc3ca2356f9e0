"""Sampling parameters: what the router and the shards both know of them, declared once.

A declaration gives the parameter's field in `Sampling`, its column in the shards' row table and its range.
The message Sampling of shard.proto has a field of the same name; `shard/sampling` gives it its effect."""

import math
import sys
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

ABOVE_ZERO = math.nextafter(0.0, 1.0)
FINITE = sys.float_info.max


class Range(NamedTuple):
    """Closed interval of the values that a request may have."""

    low: float
    high: float
    refusal: str
    """The contract's text for all other values, NaN among them."""

    def allows(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Parameter:
    name: str
    dtype: str
    """numpy's name for the type of its column."""
    off: bool | int | float
    """Value that changes nothing."""
    random_only: bool = False
    """True if it has an effect only where tokens are drawn at random: greedy rows ignore it."""
    range: Range | None = None
    """None if the contract has no text about it: its type alone bounds it."""


def parameter(dtype: str, off: bool | float, **more: Any) -> Any:
    """Declare a field of Sampling; `more` are further fields of Parameter."""
    return field(default=off, metadata={"dtype": dtype, "off": off, **more})


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a sequence. The defaults leave the distribution unchanged."""

    greedy: bool = parameter("?", True)
    seed: int = parameter("u8", 0, random_only=True)
    temperature: float = parameter(
        "f4", 1.0, random_only=True, range=Range(0.05, FINITE, refusal="temperature must be >= 0.05")
    )
    top_k: int = parameter(
        "i8", 0, random_only=True, range=Range(0, 2**31 - 1, refusal="top_k must be strictly positive")
    )
    top_p: float = parameter(
        "f4", 1.0, random_only=True, range=Range(ABOVE_ZERO, 1, refusal="top_p must be > 0.0 and <= 1.0")
    )
    typical_p: float = parameter(
        "f4", 1.0, random_only=True, range=Range(-FINITE, 1, refusal="typical_p must be <= 1.0")
    )
    min_p: float = parameter(
        "f4", 0.0, random_only=True, range=Range(0, 1, refusal="min_p must be >= 0.0 and <= 1.0")
    )
    repetition_penalty: float = parameter(
        "f4", 1.0, range=Range(ABOVE_ZERO, FINITE, refusal="repetition_penalty must be > 0.0")
    )
    presence_penalty: float = parameter(
        "f4", 0.0, range=Range(-2, 2, refusal="presence_penalty must be >= -2.0 and <= 2.0")
    )
    frequency_penalty: float = parameter(
        "f4", 0.0, range=Range(-2, 2, refusal="frequency_penalty must be >= -2.0 and <= 2.0")
    )
    # The watermark's share of green tokens, and what is added to their logits. A share of 0 means none. Its
    # type is that of the multiplication by which TGI counts green tokens.
    watermark_gamma: float = parameter("f8", 0.0)
    watermark_delta: float = parameter("f4", 0.0)
    length_penalty_start: int = parameter("i8", 0)
    length_penalty_factor: float = parameter(
        "f4", 1.0, range=Range(1, 10, refusal="length_penalty must be >= 1.0 and <= 10.0")
    )
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each once, and what is added to their logits."""


PARAMETERS = (
    *(Parameter(each.name, **each.metadata) for each in fields(Sampling) if each.metadata),
    # For the router this one is a criterion of stopping, because it also applies to stop strings.
    Parameter("min_new_tokens", "i8", 0),
)
RANGES = {each.name: each.range for each in PARAMETERS if each.range is not None}
