"""Sampling parameters: the single declaration that the APIs, the client, the router and the shards share.

A declaration gives the parameter's field in `Sampling`, its column in the shards' row table, its range and
the client's help. One in `SharedParameters` also gives the field of requests, its metadata key, its JSON
field, its count and its span attribute. The message Sampling in shard.proto has a field of the same name;
`shard/sampling` implements it."""

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
    help: str = ""
    """Effect of a value, for the client's option and the page of metadata keys. Empty: the client has no such
    option, or declares it itself."""
    span: str = ""
    """Name of the span attribute of a shared parameter, if it is not `tgis.` and the parameter's name."""

    @property
    def metadata_key(self) -> str:
        """Key under which gRPC clients set the parameter if fmaas's messages lack it."""
        return "tgis-" + self.name.replace("_", "-")

    @property
    def span_name(self) -> str:
        return self.span or f"tgis.{self.name}"


def parameter(dtype: str, off: bool | float, **more: Any) -> Any:
    """Declare a field of Sampling; `more` sets further fields of Parameter."""
    return field(default=off, metadata={"dtype": dtype, "off": off, **more})


@dataclass(frozen=True, kw_only=True)
class SharedParameters:
    """Parameters that requests and shards have under the same name, and that fmaas's messages lack. They are
    floating-point numbers with a range, and unset ones are off. A new parameter belongs here."""

    min_p: float = parameter(
        "f4",
        0.0,
        random_only=True,
        range=Range(0, 1, refusal="min_p must be >= 0.0 and <= 1.0"),
        help="Sample from the tokens with at least this share of the most likely token's probability",
    )
    presence_penalty: float = parameter(
        "f4",
        0.0,
        range=Range(-2, 2, refusal="presence_penalty must be >= -2.0 and <= 2.0"),
        help="Subtract this from the logit of each token that was generated before",
        span="gen_ai.request.presence_penalty",
    )
    frequency_penalty: float = parameter(
        "f4",
        0.0,
        range=Range(-2, 2, refusal="frequency_penalty must be >= -2.0 and <= 2.0"),
        help="Subtract this from a token's logit for each time that the token was generated before",
        span="gen_ai.request.frequency_penalty",
    )


@dataclass(frozen=True)
class Sampling(SharedParameters):
    """Sampling parameters of a sequence. The defaults leave the distribution unchanged."""

    greedy: bool = parameter("?", True)
    seed: int = parameter("u8", 0, random_only=True, help="Sample with this seed")
    temperature: float = parameter(
        "f4",
        1.0,
        random_only=True,
        range=Range(0.05, FINITE, refusal="temperature must be >= 0.05"),
        help="Sample with this temperature",
    )
    top_k: int = parameter(
        "i8",
        0,
        random_only=True,
        range=Range(0, 2**31 - 1, refusal="top_k must be strictly positive"),
        help="Sample from the K most likely tokens",
    )
    top_p: float = parameter(
        "f4",
        1.0,
        random_only=True,
        range=Range(ABOVE_ZERO, 1, refusal="top_p must be > 0.0 and <= 1.0"),
        help="Sample from the most likely tokens whose probabilities add up to this",
    )
    typical_p: float = parameter(
        "f4",
        1.0,
        random_only=True,
        range=Range(-FINITE, 1, refusal="typical_p must be <= 1.0"),
        help="Sample from the most typical tokens whose probabilities add up to this",
    )
    repetition_penalty: float = parameter(
        "f4", 1.0, range=Range(ABOVE_ZERO, FINITE, refusal="repetition_penalty must be > 0.0")
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
SHARED = tuple(each for each in PARAMETERS if hasattr(SharedParameters, each.name))
RANGES = {each.name: each.range for each in PARAMETERS if each.range is not None}
