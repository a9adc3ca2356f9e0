"""Converts a request's fields to the service's parameters."""

from typing import Any

from tgis.router.api.openai.errors import ApiError, as_api_error
from tgis.router.api.openai.fields.sampling_fields import SamplingFields
from tgis.router.errors import RequestError
from tgis.router.requests.parameters import Parameters, read_seed, same_named


def to_parameters(fields: SamplingFields, max_tokens: int | None, **details: Any) -> Parameters:
    """Return the parameters of a call. `details` are further fields of Parameters, such as the token details
    to return. Raises ApiError."""
    set_fields = {
        "sample": True,
        "top_k": max(fields.top_k or 0, 0),
        "seed": _seed(fields.seed),
        "logit_bias": _biases(fields.logit_bias or {}),
        "max_new_tokens": max_tokens or 0,
        "min_new_tokens": fields.min_tokens or 0,
        "stop_sequences": (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        "include_stop_sequence": bool(fields.include_stop_str_in_output),
        "truncate_input_tokens": fields.truncate_prompt_tokens or 0,
        "cache_salt": (fields.cache_salt or "").encode(),
        "raw_details": True,
    }
    return Parameters(**same_named(fields) | set_fields | details)


def _seed(seed: int | None) -> int | None:
    try:
        return read_seed(seed)
    except RequestError as error:
        raise as_api_error(error, "seed") from None


def _biases(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) <= 9):
            raise ApiError(400, "logit_bias: keys must be token ids in decimal", "logit_bias")
    return tuple((int(key), bias) for key, bias in biases.items())
