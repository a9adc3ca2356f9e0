"""Defines the parameters of a generation."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tgis_client.errors import SettingsError


class LengthPenalty(NamedTuple):
    """Growth of the end of sequence's probability, by `decay_factor` with each token after `start_index`."""

    start_index: int
    decay_factor: float


_SAMPLING = ("temperature", "top_k", "top_p", "typical_p", "min_p", "seed")

_MAX_UINT32 = 2**32 - 1
_MAX_UINT64 = 2**64 - 1
_MAXIMA = {
    "max_new_tokens": _MAX_UINT32,
    "min_new_tokens": _MAX_UINT32,
    "time_limit_millis": _MAX_UINT32,
    "truncate_input_tokens": _MAX_UINT32,
    "top_k": _MAX_UINT32,
    "top_n_tokens": _MAX_UINT32,
    "seed": _MAX_UINT64,
    "start_index": _MAX_UINT32,
}
"""Largest values of integers. The smallest is 0."""
_FRACTIONS = frozenset(
    (
        "temperature",
        "top_p",
        "typical_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "decay_factor",
    )
)


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters of a generation. The service has a default for each that is None or empty."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    time_limit_millis: int | None = None
    """Time after which the service ends the text, with StopReason.TIME_LIMIT."""
    stop_sequences: Sequence[str] = ()
    include_stop_sequence: bool | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    truncate_input_tokens: int | None = None
    """Number of tokens at the end of the prompt that are kept; None or 0: all."""

    sample: bool | None = None
    """True to sample, False for greedy decoding; None to sample if a parameter of sampling is set."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    min_p: float | None = None
    seed: int | None = None

    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: LengthPenalty | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Numbers to add to the logits of tokens, by token id."""
    watermark: bool = False

    regex: str | None = None
    json_schema: str | Mapping[str, Any] | None = None
    grammar: str | None = None
    """Grammar in Lark or GBNF."""
    choices: Sequence[str] = ()
    json_object: bool = False
    """True to generate any JSON object."""

    input_text: bool = False
    """True to return the prompt before the text."""
    tokens: bool = False
    input_tokens: bool = False
    logprobs: bool = False
    ranks: bool = False
    top_n_tokens: int = 0
    """Number of most likely tokens that are returned for each token."""

    def __post_init__(self) -> None:
        constraints = {
            "regex": self.regex is not None,
            "json_schema": self.json_schema is not None,
            "grammar": self.grammar is not None,
            "choices": bool(self.choices),
            "json_object": self.json_object,
        }
        given = [name for name, is_given in constraints.items() if is_given]
        if len(given) > 1:
            raise SettingsError(f"{' and '.join(given)} exclude each other")
        for name in ("stop_sequences", "choices"):
            if isinstance(getattr(self, name), str):
                raise SettingsError(f"{name} are a sequence of texts, not one text")
        _check_numbers(vars(self))
        if self.length_penalty is not None:
            _check_numbers(self.length_penalty._asdict(), "length_penalty.")

    @property
    def is_sampling(self) -> bool:
        if self.sample is not None:
            return self.sample
        return any(getattr(self, name) is not None for name in _SAMPLING)


def _check_numbers(values: Mapping[str, Any], prefix: str = "") -> None:
    """Raise SettingsError for the first number that its field cannot hold. None is no number."""
    for name, value in values.items():
        if value is None:
            continue
        if name in _MAXIMA:
            _check_integer(prefix + name, value, _MAXIMA[name])
        elif name in _FRACTIONS and (isinstance(value, str) or not hasattr(value, "__float__")):
            raise SettingsError(f"{prefix}{name} must be a number, not {value!r}")


def _check_integer(name: str, value: Any, maximum: int) -> None:
    try:
        number = operator.index(value)
    except TypeError:
        raise SettingsError(f"{name} must be an integer, not {value!r}") from None
    if not 0 <= number <= maximum:
        raise SettingsError(f"{name} must be >= 0 and <= {maximum}, not {number}")
