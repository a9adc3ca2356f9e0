"""A generation call in plain values, as an API reads it from its protocol. Nothing of it is checked yet."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from tgis.router.grammar.compiler import Guided
from tgis.router.requests.api_rules import ApiRules
from tgis.router.text.stop_sequences import StopScope

MISSING_REQUEST = "missing request"
"""Refusal of a message that lacks the input that it must have; then the only text is empty."""

Metadata = Iterable[tuple[str, str | bytes]]
"""Headers of a call, their names in lower case."""


@dataclass(frozen=True)
class Parameters:
    """Parameters of a call. Where one is None or 0, the client did not set it, and the default applies."""

    sample: bool = False
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 0.0
    typical_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 0.0
    length_penalty: tuple[int, float] | None = None
    """Number of the first token that is penalized, and the factor of decay."""
    max_new_tokens: int = 0
    min_new_tokens: int = 0
    time_limit_ms: int = 0
    stop_sequences: tuple[str, ...] = ()
    include_stop_sequence: bool | None = None
    guided: Guided | None = None
    generated_tokens: bool = False
    input_tokens: bool = False
    token_logprobs: bool = False
    token_ranks: bool = False
    top_n_tokens: int = 0
    truncate_input_tokens: int = 0
    """Number of last tokens of an input to keep; 0 keeps all."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, and what is added to their logits."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a text as the model's end of sequence does."""
    ignore_eos: bool = False
    """True if the model's end of sequence does not end a text, unless the text is guided."""
    watermark: bool = False
    n: int = 1
    """Number of texts to generate for each input."""
    cache_salt: bytes = b""
    """Only inputs of equal salts share cached blocks."""
    raw_details: bool = False
    """True if generated tokens are described by the model's own logits, before anything changes them."""


@dataclass(frozen=True)
class GenerationCall:
    method: str
    """The API's name of the method, for example `Generate`."""
    kind: str
    """Label of the call in metrics: single, batch or stream."""
    texts: list[str]
    parameters: Parameters
    describe_parameters: Callable[[], str]
    """Return the parameters for the log, under the API's names, without any text of the client's."""
    metadata: Metadata
    connection: Hashable
    """Where the call comes from; calls of one connection take turns."""
    prefix_id: str | None = None
    adapter_id: str | None = None
    model_id: str = ""
    refusal: str = ""
    """Why the API cannot read the call; empty if it can. What it cannot read is left out."""
    inputs_are_ids: bool = False
    """True if each text is token ids, as decimal numbers with a space between each two."""
    adds_special_tokens: bool = True
    """False if a text has all its special tokens already, as a chat template writes them."""
    tenant: str = ""
    """Name that the caller's certificate or token has; empty if it has none."""
    api: ApiRules = field(kw_only=True)
    shown_special_ids: frozenset[int] = frozenset()
    """Special tokens that the texts show, although others are left out."""
    make_stop_scope: Callable[[], StopScope] | None = None
    """Makes the scope of the stop sequences of one text; None if they end it wherever they are."""
