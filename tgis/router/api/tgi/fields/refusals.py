"""Rewords the service's refusals as TGI's."""

from collections.abc import Iterator
from contextlib import contextmanager

from tgis.router.api.renamed_parameters import plain_text
from tgis.router.api.tgi.rules import TGI
from tgis.router.errors import InputTooLongError, NotFoundError, RequestError
from tgis.router.requests.parameters import Parameters
from tgis.router.requests.validation import MAX_STOP_SEQUENCE_BYTES, RequestLimits

TOTAL = "`inputs` tokens + `max_new_tokens` must be <= {}. Given: {} `inputs` tokens and {} `max_new_tokens`"
INPUT = "`inputs` must have less than {} tokens. Given: {}"
MAX_NEW_TOKENS = "`max_new_tokens` must be <= {}. Given: {}"
STOPS = f"`stop` must have texts of 1 to {MAX_STOP_SEQUENCE_BYTES} UTF8 bytes"
INVALID_GRAMMAR = "grammar is not valid: {}"
GRAMMARS = ("format", "json_schema", "regex")
"""The service's names of constraints."""


def find_max_input_tokens(limits: RequestLimits) -> int:
    """Return the maximum number of tokens in an input."""
    room = limits.max_sequence_length - 1
    return min(limits.max_input_tokens or room, room)


@contextmanager
def translated_refusals(parameters: Parameters, limits: RequestLimits) -> Iterator[None]:
    """Raise the service's refusals of a call with TGI's texts."""
    try:
        yield
    except NotFoundError:
        raise
    except RequestError as error:
        if (text := _translate(error, str(error), parameters, limits)) is None:
            raise
        refusal = RequestError(text, error.parameter, describe_refusal(parameters, limits, error))
        refusal.is_logged = error.is_logged
        raise refusal from None


def describe_refusal(parameters: Parameters, limits: RequestLimits, error: RequestError) -> str:
    """Return a refusal's text for the log, which quotes nothing."""
    if isinstance(error, NotFoundError):
        return error.log_text
    return _translate(error, error.log_text, parameters, limits) or error.log_text


def _translate(error: RequestError, text: str, parameters: Parameters, limits: RequestLimits) -> str | None:
    """Return TGI's words for a refusal with the service's `text`, or None to keep them."""
    if isinstance(error, InputTooLongError):
        return _length_text(error.num_inputs, parameters.max_new_tokens, limits)
    match error.parameter:
        case "text":
            return plain_text(text)
        case "max_new_tokens":
            return MAX_NEW_TOKENS.format(limits.max_new_tokens_for(TGI), parameters.max_new_tokens)
        case "stop_sequences":
            return STOPS
        case field if field in GRAMMARS:
            reason = text.removeprefix(f"{field} ")
            is_invalid = reason.startswith("is not valid")
            return f"grammar {reason}" if is_invalid else INVALID_GRAMMAR.format(f"it {reason}")
    return None


def _length_text(num_inputs: int, max_new_tokens: int, limits: RequestLimits) -> str:
    """Return why an input of `num_inputs` tokens is refused. 0 new tokens stand for the rest of the
    length."""
    total = limits.max_sequence_length
    num_new = max_new_tokens or max(total - num_inputs, 0)
    if num_inputs + num_new > total:
        return TOTAL.format(total, num_inputs, num_new)
    return INPUT.format(find_max_input_tokens(limits), num_inputs)
