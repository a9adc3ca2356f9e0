"""Converts the service's refusals to the API's, which name the wrong field of the request."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tgis.router.api.openai.errors import MISSING_MODEL, ApiError, missing_model
from tgis.router.api.renamed_parameters import renamed_log_text, renamed_text
from tgis.router.errors import InputTooLongError, NotFoundError, RequestError

INPUT = "text"
"""The service's name of the input. Each route has its own name for it."""
NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "top_n_tokens": "logprobs",
    "truncate_input_tokens": "truncate_prompt_tokens",
    "adapter_id": "model",
}
"""This API's names of parameters by the service's names, where they differ."""
TOO_LONG = "context_length_exceeded"


@contextmanager
def translated_refusals(model: str | None, names: Mapping[str, str]) -> Iterator[None]:
    """Raise the service's refusals as ApiError. `model` is the request's model. `names` replaces entries of
    NAMES for the request or its route."""
    try:
        yield
    except RequestError as error:
        is_missing = isinstance(error, NotFoundError)
        refusal = missing_model(model) if is_missing else _translate(error, {**NAMES, **names})
        refusal.is_logged = error.is_logged
        raise refusal from None


def describe_refusal(names: Mapping[str, str], error: RequestError) -> str:
    """Return a refusal's text for the log. `names` replaces entries of NAMES."""
    if isinstance(error, NotFoundError):
        return MISSING_MODEL
    return renamed_log_text(error, {**NAMES, **names}, INPUT)


def _translate(error: RequestError, names: Mapping[str, str]) -> ApiError:
    text = renamed_text(error, names, INPUT)
    log_text = renamed_log_text(error, names, INPUT)
    param = names.get(error.parameter, error.parameter) or None
    if isinstance(error, InputTooLongError):
        text = f"This model's maximum context length is exceeded: {text}"
        return ApiError(400, text, param, TOO_LONG, log_text)
    return ApiError(400, text, param, log_text=log_text)
