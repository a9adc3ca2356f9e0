"""Defines the arguments of a call besides its prompts and parameters, and their metadata."""

import sys
from collections.abc import Mapping, Sequence
from typing import TypedDict

from tgis_client.errors import SettingsError
from tgis_client.parameters import Parameters

Prompt = str | Sequence[int]
"""Text, or token ids."""
Metadata = tuple[tuple[str, str | bytes], ...]


class CallArguments(TypedDict, total=False):
    """Keyword arguments that all calls accept."""

    timeout: float | None
    """Maximum duration in seconds, of all attempts together; None: no limit."""
    model_id: str
    prefix_id: str | None
    """Id of a tuned soft prompt, or of an adapter if `adapter_id` is not set."""
    adapter_id: str | None
    priority: int | None
    """Inputs of calls with lower values start first."""
    cache_salt: str | bytes | None
    """Only calls with the same salt share cached prompts."""
    token_ids: bool
    """True to return ids of tokens."""
    trace_context: Mapping[str, str] | None
    """`traceparent` and other fields of a trace; if unset, OpenTelemetry's current span is passed on."""
    metadata: Sequence[tuple[str, str | bytes]]
    """Further metadata."""


def encode_prompts(prompts: Sequence[Prompt]) -> tuple[list[str], bool]:
    """Return the prompts' texts as sent, and True if they are token ids. Raises SettingsError."""
    if isinstance(prompts, str):
        raise SettingsError("prompts are a sequence of texts or of token ids, not one text")
    is_text = [isinstance(prompt, str) for prompt in prompts]
    if any(is_text) != all(is_text):
        raise SettingsError("the prompts of a call must all be texts, or all be token ids")
    texts = [prompt if isinstance(prompt, str) else " ".join(map(str, prompt)) for prompt in prompts]
    return texts, bool(texts) and not any(is_text)


def generation_metadata(parameters: Parameters, arguments: CallArguments, is_ids: bool) -> Metadata:
    """Return the metadata for what fmaas's messages have no field for."""
    priority, salt = arguments.get("priority"), arguments.get("cache_salt")
    texts = {
        "tgis-logit-bias": ",".join(f"{id}:{float(bias)}" for id, bias in parameters.logit_bias.items()),
        "tgis-min-p": _number(parameters.min_p),
        "tgis-presence-penalty": _number(parameters.presence_penalty),
        "tgis-frequency-penalty": _number(parameters.frequency_penalty),
        "tgis-stop-token-ids": ",".join(map(str, parameters.stop_token_ids)),
        "tgis-ignore-eos": "true" if parameters.ignore_eos else "",
        "tgis-watermark": "true" if parameters.watermark else "",
        "tgis-priority": "" if priority is None else str(priority),
    }
    given: Metadata = tuple((key, text) for key, text in texts.items() if text)
    if salt is not None:
        # Unlike tgis-cache-salt, this key accepts any bytes.
        given += (("tgis-cache-salt-bin", salt.encode() if isinstance(salt, str) else salt),)
    return given + call_metadata(arguments, is_ids)


def call_metadata(arguments: CallArguments, is_ids: bool = False) -> Metadata:
    """Return the metadata that every method accepts. Keys in `metadata` replace those of the trace."""
    switches = {"tgis-input": is_ids, "tgis-tokens": arguments.get("token_ids", False)}
    own = tuple((key, "ids") for key, is_on in switches.items() if is_on) + tuple(
        arguments.get("metadata", ())
    )
    keys = {key for key, _ in own}
    trace = _trace_metadata(arguments.get("trace_context"))
    return own + tuple((key, value) for key, value in trace if key not in keys)


def _number(value: float | None) -> str:
    return "" if value is None else str(float(value))


def _trace_metadata(given: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """Return the fields of the given context, or of OpenTelemetry's current one, as metadata."""
    carrier = _current_trace() if given is None else given
    return tuple((key.lower(), value) for key, value in carrier.items())


def _current_trace() -> dict[str, str]:
    """Return the fields of the current span."""
    carrier: dict[str, str] = {}
    # A program that has not imported OpenTelemetry has no span.
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry import propagate

        propagate.inject(carrier)
    return carrier
