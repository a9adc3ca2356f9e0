"""Sampling parameters: the single declaration that the router and the shards share.

A declaration gives the parameter's field in `Sampling`, its column in the shards' row table and its range.
The message Sampling in shard.proto has a field of the same name; `shard/sampling` implements it."""

import math
import sys
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

ABOVE_ZERO = math.nextafter(0.0, 1.0)
FINITE = sys.float_info.max


class Range(NamedTuple):
    """Closed interval of the accepted values."""

    low: float
    high: float
    refusal: str
    """Contract's error text for any other value, including NaN."""

    def allows(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Parameter:
    name: str
    dtype: str
    """numpy dtype of its column."""
    off: bool | int | float
    """Value that has no effect."""
    random_only: bool = False
    """True if only random sampling uses it; greedy sequences ignore it."""
    range: Range | None = None
    """None if the contract has no error text for it, so only its type limits it."""


def parameter(dtype: str, off: bool | float, **more: Any) -> Any:
    """Declare a field of Sampling; `more` sets further fields of Parameter."""
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
    # Fraction of green tokens in the watermark (0: no watermark), and the bias added to their logits. The
    # fraction is a double because TGI computes the number of green tokens in double precision.
    watermark_gamma: float = parameter("f8", 0.0)
    watermark_delta: float = parameter("f4", 0.0)
    length_penalty_start: int = parameter("i8", 0)
    length_penalty_factor: float = parameter(
        "f4", 1.0, range=Range(1, 10, refusal="length_penalty must be >= 1.0 and <= 10.0")
    )
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Unique token ids, each with the bias that is added to its logit."""


PARAMETERS = (
    *(Parameter(each.name, **each.metadata) for each in fields(Sampling) if each.metadata),
    # The router treats this one as a stopping criterion, because it also applies to stop strings.
    Parameter("min_new_tokens", "i8", 0),
)
RANGES = {each.name: each.range for each in PARAMETERS if each.range is not None}
