"""Reads the parameters of a request: names, ranges, and their equivalents in the service."""

from typing import Annotated, Any

from msgspec import Meta

from tgis.router.api.http.fields.refused_fields import RefusedField, find_refused
from tgis.router.api.http.fields.shared_fields import SharedFields, restricts_sampling
from tgis.router.errors import RequestError
from tgis.router.requests.parameters import Parameters, read_seed, same_named

MOST = 2**31 - 1

Positive = Annotated[int, Meta(ge=1, le=MOST)]
TopTokens = Annotated[int, Meta(ge=0, le=20)]
TokenId = Annotated[int, Meta(ge=0, le=999_999_999)]


class LmiParameters(SharedFields, kw_only=True):
    """Known parameters. Those of type Any are refused: they would change the text, and are not supported.
    Unknown parameters are ignored, as in LMI's containers."""

    do_sample: bool | None = None
    seed: int | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MOST)] | None = None
    """0 and -1 keep all tokens."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_new_tokens: Positive | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MOST)] | None = None
    stop_sequences: str | list[str] | None = None
    stop: str | list[str] | None = None
    """Same as `stop_sequences`, under the engine's own name."""
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos_token: bool | None = None
    truncate: Positive | None = None
    watermark: bool | None = None
    n: Positive | None = None
    best_of: Positive | None = None
    details: bool | None = None
    return_full_text: bool | None = None
    decoder_input_details: bool | None = None
    logprobs: TopTokens | None = None
    prompt_logprobs: TopTokens | None = None
    top_n_tokens: TopTokens | None = None

    num_beams: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    bad_sequences: Any = None
    bad_words: Any = None
    logits_processors: Any = None
    grammar: Any = None
    guided_decoding: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    response_format: Any = None
    structured_outputs: Any = None

    @property
    def samples(self) -> bool:
        """True if texts are sampled: by `do_sample`, or without it by other sampling parameters."""
        if self.do_sample is not None:
            return self.do_sample
        if self.temperature is not None:
            return self.temperature > 0
        shares = (self.top_p, self.typical_p)
        excludes = (self.top_k or 0) > 0 or any(one is not None and one < 1 for one in shares)
        return excludes or restricts_sampling(self)

    @property
    def removes_stops(self) -> bool:
        """True if a text does not include the stop sequence that ended it."""
        return bool(self.stop_sequences or self.stop) and not self.include_stop_str_in_output

    @property
    def num_shown(self) -> int:
        """Number of texts that the answer shows for each input, the best first."""
        return self.n or self.best_of or 1

    @property
    def num_texts(self) -> int:
        """Number of texts generated for each input."""
        return self.best_of or self.n or 1

    @property
    def num_top(self) -> int:
        return self.logprobs or 0 if self.top_n_tokens is None else self.top_n_tokens

    @property
    def wants_inputs(self) -> bool:
        """True if the answer's details include the input's tokens."""
        return bool(self.decoder_input_details) or self.prompt_logprobs is not None


BEAMS = RefusedField("Texts are sampled or decoded greedily.", (1,))
OF_BEAMS = RefusedField("It belongs to beam search.", (1, 1.0))
FORBIDDING = RefusedField("No text can be forbidden.")
CONSTRAINT = RefusedField("Use response_format with messages or prompt.")
REFUSED = {
    "num_beams": BEAMS,
    "use_beam_search": BEAMS,
    "length_penalty": OF_BEAMS,
    "early_stopping": OF_BEAMS,
    "skip_special_tokens": RefusedField("The operator decides if special tokens are shown.", (True,)),
    "spaces_between_special_tokens": RefusedField("Tokens are decoded as they are.", (True,)),
    "bad_sequences": FORBIDDING,
    "bad_words": FORBIDDING,
    "logits_processors": RefusedField("A request cannot bring code."),
    "grammar": CONSTRAINT,
    "guided_decoding": CONSTRAINT,
    "guided_json": CONSTRAINT,
    "guided_regex": CONSTRAINT,
    "guided_choice": CONSTRAINT,
    "guided_grammar": CONSTRAINT,
    "response_format": CONSTRAINT,
    "structured_outputs": CONSTRAINT,
}


def check_parameters(
    fields: LmiParameters, is_stream: bool, max_texts: int, is_encoder_decoder: bool
) -> None:
    """Refuse unsupported and contradictory parameters. Raises RequestError."""
    for name, text in find_refused(fields, REFUSED):
        raise RequestError(text, name)
    if fields.num_texts > max_texts:
        name = "n" if fields.best_of is None else "best_of"
        raise RequestError(f"{name} must be <= {max_texts}", name)
    if fields.num_texts < fields.num_shown:
        raise RequestError("best_of must be >= n", "best_of")
    if fields.stop_sequences and fields.stop:
        raise RequestError("only one of stop_sequences and stop may be given", "stop")
    if fields.wants_inputs and is_encoder_decoder:
        name = "decoder_input_details"
        raise RequestError(f"{name} is not supported for encoder-decoder models", name)
    if is_stream and fields.wants_inputs:
        raise RequestError("decoder_input_details cannot be streamed", "decoder_input_details")
    if is_stream and fields.num_texts > 1:
        raise RequestError("n and best_of cannot be streamed", "n")


def to_parameters(fields: LmiParameters, shows_tokens: bool, shows_inputs: bool) -> Parameters:
    """Return the parameters of a call. The flags request details of the generated and the input tokens."""
    stops = fields.stop_sequences or fields.stop or ()
    others = {
        "sample": fields.samples,
        "top_k": max(fields.top_k or 0, 0),
        "seed": read_seed(fields.seed),
        "min_new_tokens": fields.min_tokens or 0,
        "stop_sequences": (stops,) if isinstance(stops, str) else tuple(stops),
        "include_stop_sequence": bool(fields.include_stop_str_in_output),
        "ignore_eos": bool(fields.ignore_eos_token),
        "truncate_input_tokens": fields.truncate or 0,
        "n": fields.num_texts,
        "generated_tokens": shows_tokens,
        "input_tokens": shows_inputs,
        "token_logprobs": shows_tokens,
        "top_n_tokens": fields.num_top if shows_tokens else 0,
        "raw_details": True,
    }
    return Parameters(**same_named(fields) | others)
