"""Parameters of a call, declared once for all APIs: default, rule, and names in metrics and traces. How each
API spells one stands in the API's package."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from tgis.router.grammar.compiler import Guided
from tgis.sampling_parameters import RANGES, Range

MAX_LOGIT_BIASES = 1024
MAX_BIAS = 100
MAX_STOP_TOKEN_IDS = 64
MAX_CACHE_SALT_BYTES = 256
NUM_SEEDS = 2**64  # other seeds, negative ones too, are taken modulo this where an API allows them


class Rule(NamedTuple):
    allows: Callable[[Any], bool]
    refusal: str


def _are_biases(biases: tuple[tuple[int, float], ...]) -> bool:
    num_ids = len({token_id for token_id, _ in biases})
    in_range = all(-MAX_BIAS <= bias <= MAX_BIAS for _, bias in biases)  # NaN is not
    return num_ids == len(biases) <= MAX_LOGIT_BIASES and in_range


LOGIT_BIAS_RULE = Rule(
    _are_biases,
    f"logit_bias must be at most {MAX_LOGIT_BIASES} token ids, each once, with values "
    f"from -{MAX_BIAS} to {MAX_BIAS}",
)
STOP_TOKEN_IDS_RULE = Rule(
    lambda token_ids: len(token_ids) <= MAX_STOP_TOKEN_IDS,
    f"stop_token_ids must be at most {MAX_STOP_TOKEN_IDS} token ids",
)
CACHE_SALT_RULE = Rule(
    lambda salt: len(salt) <= MAX_CACHE_SALT_BYTES,
    f"cache_salt must be at most {MAX_CACHE_SALT_BYTES} bytes",
)


class SpanAttribute(NamedTuple):
    name: str
    is_count: bool = False
    """True if the attribute is the number of values, because they may be many or the client's texts."""


@dataclass(frozen=True)
class ParameterInfo:
    name: str
    unset: Any
    """Value of a parameter that the client did not set."""
    rule: Rule | Range | None = None
    """Rule that TGIS lacks, checked after TGIS's own; unset and empty values need none. An API that reads the
    parameter from a text checks it at once, to refuse it by the name that its clients know."""
    is_counted: bool = False
    """True if metrics count the calls that set it: fmaas's messages do not have it."""
    span_attribute: SpanAttribute | None = None
    is_fmaas_only: bool = False
    """True if the name means something else in other APIs."""


def parameter(unset: Any, span: str | SpanAttribute = "", **more: Any) -> Any:
    """Declare a field of Parameters. `more` are further fields of ParameterInfo."""
    attribute = SpanAttribute(span) if isinstance(span, str) else span
    named = attribute if attribute.name else None
    return field(default=unset, metadata={"span_attribute": named, **more})


@dataclass(frozen=True)
class Parameters:
    """Parameters of a call. Where one is None or 0, the client did not set it, and the default applies."""

    sample: bool = parameter(False)
    temperature: float | None = parameter(None)
    top_k: int = parameter(0, "gen_ai.request.top_k")
    top_p: float = parameter(0.0, "gen_ai.request.top_p")
    typical_p: float = parameter(0.0)
    seed: int | None = parameter(None)
    repetition_penalty: float = parameter(0.0)
    length_penalty: tuple[int, float] | None = parameter(None, is_fmaas_only=True)
    """Number of the first token that is penalized, and the factor of decay."""
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
    """Number of last tokens of an input to keep; 0 keeps all."""
    logit_bias: tuple[tuple[int, float], ...] = parameter(
        (),
        SpanAttribute("tgis.logit_bias_count", is_count=True),
        rule=LOGIT_BIAS_RULE,
        is_counted=True,
    )
    """Token ids, and what is added to their logits."""
    min_p: float = parameter(0.0, "tgis.min_p", rule=RANGES["min_p"], is_counted=True)
    presence_penalty: float = parameter(
        0.0, "gen_ai.request.presence_penalty", rule=RANGES["presence_penalty"], is_counted=True
    )
    frequency_penalty: float = parameter(
        0.0, "gen_ai.request.frequency_penalty", rule=RANGES["frequency_penalty"], is_counted=True
    )
    stop_token_ids: tuple[int, ...] = parameter(
        (),
        SpanAttribute("tgis.stop_token_id_count", is_count=True),
        rule=STOP_TOKEN_IDS_RULE,
        is_counted=True,
    )
    """Token ids that end a text as the model's end of sequence does."""
    ignore_eos: bool = parameter(False, "tgis.ignore_eos", is_counted=True)
    """True if the model's end of sequence does not end a text, unless the text is guided."""
    watermark: bool = parameter(False, "tgis.watermark", is_counted=True)
    n: int = parameter(1, is_counted=True)
    """Number of texts to generate for each input."""
    cache_salt: bytes = parameter(b"", rule=CACHE_SALT_RULE, is_counted=True)
    """Only inputs of equal salts share cached blocks."""
    raw_details: bool = parameter(False)
    """True if generated tokens are described by the model's own logits, before anything changes them."""


PARAMETERS = tuple(ParameterInfo(each.name, each.default, **each.metadata) for each in fields(Parameters))
RULES = {each.name: each.rule for each in PARAMETERS if each.rule is not None}


def same_named(fields: object) -> dict[str, Any]:
    """Return the parameters that a request's fields have under the same names. None is not set, and a list
    becomes a tuple."""
    values = {info.name: getattr(fields, info.name, None) for info in PARAMETERS if not info.is_fmaas_only}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if value is not None
    }
