"""Declares the parameters of a call once for all APIs: default, rule, and names in metrics and traces. Each
API's package declares the API's own names for them."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from tgis.config.serving import MIN_PRIORITY
from tgis.router.errors import RequestError
from tgis.router.grammar.compiler import Guided
from tgis.sampling_parameters import SHARED, Range, SharedParameters

MAX_LOGIT_BIASES = 1024
MAX_BIAS = 100
MAX_STOP_TOKEN_IDS = 64
MAX_CACHE_SALT_BYTES = 256
MAX_PRIORITY = 2**31 - 1
# All numbers that clients write with 64 bits, signed or not.
MIN_SEED = -(2**63)
MAX_SEED = 2**64 - 1


class Rule(NamedTuple):
    allows: Callable[[Any], bool]
    refusal: str


def _are_biases(biases: tuple[tuple[int, float], ...]) -> bool:
    num_ids = len({token_id for token_id, _ in biases})
    in_range = all(-MAX_BIAS <= bias <= MAX_BIAS for _, bias in biases)  # False for NaN
    return num_ids == len(biases) <= MAX_LOGIT_BIASES and in_range


LOGIT_BIAS_RULE = Rule(
    _are_biases,
    f"logit_bias must have at most {MAX_LOGIT_BIASES} token ids, each once, with values "
    f"from -{MAX_BIAS} to {MAX_BIAS}",
)
STOP_TOKEN_IDS_RULE = Rule(
    lambda token_ids: len(token_ids) <= MAX_STOP_TOKEN_IDS,
    f"stop_token_ids must have at most {MAX_STOP_TOKEN_IDS} token ids",
)
CACHE_SALT_RULE = Rule(
    lambda salt: len(salt) <= MAX_CACHE_SALT_BYTES,
    f"cache_salt must have at most {MAX_CACHE_SALT_BYTES} bytes",
)

PRIORITY_RULE = Rule(
    lambda priority: MIN_PRIORITY <= priority <= MAX_PRIORITY,
    f"priority must be >= {MIN_PRIORITY} and <= {MAX_PRIORITY}",
)


class SpanAttribute(NamedTuple):
    name: str
    is_count: bool = False
    """True to record only the number of values, because they may be many or contain the client's texts."""


@dataclass(frozen=True)
class ParameterInfo:
    name: str
    unset: Any
    """Value if the client does not set the parameter."""
    rule: Rule | Range | None = None
    """Rule that TGIS lacks, checked after TGIS's own rules, except for unset and empty values. An API that
    parses the parameter from text checks the rule while parsing, to refuse it under the API's name."""
    is_counted: bool = False
    """True if metrics count the calls that set the parameter, because fmaas's messages lack it."""
    span_attribute: SpanAttribute | None = None
    is_fmaas_only: bool = False
    """True if the name has a different meaning in other APIs."""


def parameter(unset: Any, span: str | SpanAttribute = "", **more: Any) -> Any:
    """Declare a field of Parameters. `more` sets further fields of its ParameterInfo."""
    attribute = SpanAttribute(span) if isinstance(span, str) else span
    named = attribute if attribute.name else None
    return field(default=unset, metadata={"span_attribute": named, **more})


@dataclass(frozen=True, kw_only=True)
class Parameters(SharedParameters):
    """Parameters of a call. If one is None or 0, the client did not set it, and the default applies."""

    sample: bool = parameter(False)
    temperature: float | None = parameter(None)
    top_k: int = parameter(0, "gen_ai.request.top_k")
    top_p: float = parameter(0.0, "gen_ai.request.top_p")
    typical_p: float = parameter(0.0)
    seed: int | None = parameter(None)
    repetition_penalty: float = parameter(0.0)
    length_penalty: tuple[int, float] | None = parameter(None, is_fmaas_only=True)
    """Index of the first penalized token, and the decay factor."""
    max_new_tokens: int = parameter(0, "gen_ai.request.max_tokens")
    min_new_tokens: int = parameter(0)
    time_limit_ms: int = parameter(0)
    stop_sequences: tuple[str, ...] = parameter((), SpanAttribute("tgis.stop_sequence_count", is_count=True))
    include_stop_sequence: bool | None = parameter(None)
    guided: Guided | None = field(default=None)
    generated_tokens: bool = parameter(False)
    input_tokens: bool = parameter(False)
    token_logprobs: bool = parameter(False)
    token_ranks: bool = parameter(False)
    top_n_tokens: int = parameter(0)
    truncate_input_tokens: int = parameter(0)
    """Number of tokens to keep from the end of an input; 0 keeps all."""
    logit_bias: tuple[tuple[int, float], ...] = parameter(
        (),
        SpanAttribute("tgis.logit_bias_count", is_count=True),
        rule=LOGIT_BIAS_RULE,
        is_counted=True,
    )
    """Pairs of a token id and the bias that is added to its logit."""
    stop_token_ids: tuple[int, ...] = parameter(
        (),
        SpanAttribute("tgis.stop_token_id_count", is_count=True),
        rule=STOP_TOKEN_IDS_RULE,
        is_counted=True,
    )
    """Token ids that end a text as the model's EOS token does."""
    ignore_eos: bool = parameter(False, "tgis.ignore_eos", is_counted=True)
    """True if the model's EOS token does not end a text. Guided texts ignore this."""
    watermark: bool = parameter(False, "tgis.watermark", is_counted=True)
    n: int = parameter(1, is_counted=True)
    """Number of texts to generate for each input."""
    cache_salt: bytes = parameter(b"", rule=CACHE_SALT_RULE, is_counted=True)
    """Salt of the prefix cache. Only inputs with equal salts share cached blocks."""
    priority: int = parameter(0, "tgis.priority", rule=PRIORITY_RULE, is_counted=True)
    """Requests with lower values are served first, as in vLLM."""
    raw_details: bool = parameter(False)
    """True if the details of generated tokens come from the model's unmodified logits."""


_SHARED = {
    each.name: {"rule": each.range, "is_counted": True, "span_attribute": SpanAttribute(each.span_name)}
    for each in SHARED
}
PARAMETERS = tuple(
    ParameterInfo(each.name, each.default, **_SHARED.get(each.name, each.metadata))
    for each in fields(Parameters)
)
RULES = {each.name: each.rule for each in PARAMETERS if each.rule is not None}


def read_seed(seed: int | None) -> int | None:
    """Return a client's seed as 64 bits without a sign. Raises RequestError."""
    if seed is None:
        return None
    if not MIN_SEED <= seed <= MAX_SEED:
        raise RequestError(f"seed must be >= {MIN_SEED} and <= {MAX_SEED}", "seed")
    return seed & MAX_SEED


def same_named(fields: object) -> dict[str, Any]:
    """Return the parameters that a request has in fields of the same names. A field that is None is not set,
    and lists become tuples."""
    values = {info.name: getattr(fields, info.name, None) for info in PARAMETERS if not info.is_fmaas_only}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if value is not None
    }
