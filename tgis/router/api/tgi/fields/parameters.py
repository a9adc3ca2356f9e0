"""Checks a request's parameters in TGI's order, and converts them to the service's parameters."""

from collections.abc import Iterator

import msgspec

from tgis.router.api.tgi.fields.refusals import INVALID_GRAMMAR, find_max_input_tokens
from tgis.router.api.tgi.rules import TGI
from tgis.router.api.tgi.types import GenerateParameters, GenerateRequest, GrammarField
from tgis.router.grammar.compiler import Guided
from tgis.router.requests.parameters import MAX_SEED, Parameters, same_named
from tgis.router.requests.validation import RequestLimits

MAX_PENALTY = 2.0
UNREADABLE = Parameters()
"""Placeholder for refused parameters."""


def read_parameters(body: GenerateRequest, is_stream: bool, limits: RequestLimits) -> tuple[Parameters, str]:
    """Return the parameters of a call and an empty text, or a placeholder and the reason for the refusal."""
    given = body.parameters or GenerateParameters(do_sample=True)
    refusal = next(_problems(body.inputs, given, is_stream, limits), "")
    return (UNREADABLE, refusal) if refusal else (_to_parameters(given, is_stream), "")


def _problems(
    inputs: str, given: GenerateParameters, is_stream: bool, limits: RequestLimits
) -> Iterator[str]:
    """Yield the errors in a request, in the order in which TGI checks for them."""
    yield from _best_of_problems(given, is_stream, limits)
    if given.temperature is not None and not given.temperature > 0:
        yield "`temperature` must be strictly positive"
    if given.repetition_penalty is not None and not given.repetition_penalty > 0:
        yield "`repetition_penalty` must be strictly positive"
    if not -MAX_PENALTY <= (given.frequency_penalty or 0) <= MAX_PENALTY:
        yield "`frequency_penalty` must be >= -2.0 and <= 2.0"
    if given.top_p is not None and not 0 < given.top_p <= 1:
        yield "`top_p` must be > 0.0 and < 1.0"
    if given.typical_p is not None and not 0 < given.typical_p <= 1:
        yield "`typical_p` must be > 0.0 and < 1.0"
    if given.top_k is not None and not given.top_k > 0:
        yield "`top_k` must be strictly positive"
    if given.max_new_tokens is not None and not given.max_new_tokens > 0:
        yield "`max_new_tokens` must be strictly positive"
    max_stops = limits.max_stop_sequences_for(TGI)
    num_stops = len(given.stop or ())
    if num_stops > max_stops:
        yield f"`stop` supports up to {max_stops} stop sequences. Given: {num_stops}"
    if given.seed is not None and (given.best_of or 1) > 1:
        yield "`seed` must not be set when `best_of` > 1"
    if not 0 <= (given.seed or 0) <= MAX_SEED:
        yield f"`seed` must be >= 0 and <= {MAX_SEED}"
    if not 0 <= (given.top_n_tokens or 0) <= limits.max_top_n_tokens:
        yield (f"`top_n_tokens` must be >= 0 and <= {limits.max_top_n_tokens}. Given: {given.top_n_tokens}")
    if not inputs:
        yield "`inputs` cannot be empty"
    max_inputs = find_max_input_tokens(limits)
    if given.truncate is not None and not 0 < given.truncate <= max_inputs:
        yield f"`truncate` must be strictly positive and less than {max_inputs}. Given: {given.truncate}"
    yield from _grammar_problems(given.grammar, limits)


def _best_of_problems(given: GenerateParameters, is_stream: bool, limits: RequestLimits) -> Iterator[str]:
    best_of = given.best_of
    max_best_of = limits.max_best_of_for(TGI)
    if is_stream and best_of not in (None, 1):
        yield "`best_of` != 1 is not supported when streaming tokens"
    if is_stream and given.decoder_input_details:
        yield "`decoder_input_details` == true is not supported when streaming tokens"
    if max_best_of == 1 and best_of not in (None, 1):
        yield "`best_of` != 1 is not allowed for this endpoint"
    if best_of is not None and not 0 < best_of <= max_best_of:
        yield f"`best_of` must be > 0 and <= {max_best_of}. Given: {best_of}"
    choices = (given.temperature, given.top_k, given.top_p, given.typical_p)
    if (best_of or 1) > 1 and not given.do_sample and all(choice is None for choice in choices):
        yield "you must use sampling when `best_of` is > 1"


def _grammar_problems(grammar: GrammarField | None, limits: RequestLimits) -> Iterator[str]:
    if grammar is None:
        return
    if not limits.allows_guided:
        yield "grammar is not supported"
    match grammar:
        case GrammarField("regex", str()) | GrammarField("json" | "json_object", str() | dict()):
            return
        case GrammarField("json_schema", {"schema": dict()}):
            return
        case GrammarField("regex"):
            yield INVALID_GRAMMAR.format("it must be a regular expression")
        case GrammarField("json_schema"):
            yield INVALID_GRAMMAR.format("it must be an object with a `schema`")
        case _:
            yield INVALID_GRAMMAR.format("it must be a JSON schema")


def _to_parameters(given: GenerateParameters, is_stream: bool) -> Parameters:
    best_of = given.best_of or 1
    wants_inputs = bool(given.decoder_input_details)
    shows_tokens = is_stream or bool(given.details) or wants_inputs
    wants_tokens = shows_tokens or best_of > 1  # the tokens determine the best text
    others = {
        "sample": _samples(given),
        "stop_sequences": tuple(given.stop or ()),
        "include_stop_sequence": True,
        "guided": _read_guided(given.grammar),
        "generated_tokens": wants_tokens,
        "input_tokens": wants_inputs,
        "token_logprobs": wants_tokens,
        "top_n_tokens": (given.top_n_tokens or 0) if shows_tokens else 0,
        "truncate_input_tokens": given.truncate or 0,
        "n": best_of,
    }
    return Parameters(**same_named(given) | others)


def _samples(given: GenerateParameters) -> bool:
    """Return True if tokens are sampled: on request, or because a parameter only affects sampling."""
    is_warped = given.temperature not in (None, 1) or bool(given.top_k)
    return bool(given.do_sample) or is_warped or (given.top_p or 1) < 1 or (given.typical_p or 1) < 1


def _read_guided(grammar: GrammarField | None) -> Guided | None:
    if grammar is None:
        return None
    if grammar.type == "regex":
        return Guided("regex", grammar.value)
    schema = grammar.value["schema"] if grammar.type == "json_schema" else grammar.value
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return Guided("json_schema", text)
