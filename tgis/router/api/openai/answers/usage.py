"""Writes the facts about a whole generation in answers: token counts, reasons and the fingerprint."""

from collections.abc import Collection

import msgspec
from msgspec import UNSET, UnsetType

from tgis import __version__
from tgis.router.events import Output
from tgis.router.sequence import StopReason

SYSTEM_FINGERPRINT = f"tgis-{__version__}"


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Absent if the service knows no format of the model's reasoning."""


def make_usage(
    num_prompt: int, num_completion: int, num_cached: int, num_reasoning: int | None = None
) -> Usage:
    details = UNSET if num_reasoning is None else CompletionTokensDetails(num_reasoning)
    total = num_prompt + num_completion
    return Usage(num_prompt, num_completion, total, PromptTokensDetails(num_cached), details)


def finish_reason(output: Output) -> str | None:
    """Return the API's finish reason, or None if the generation goes on."""
    if output.reason is StopReason.NOT_FINISHED:
        return None
    return "stop" if output.reason in (StopReason.EOS_TOKEN, StopReason.STOP_SEQUENCE) else "length"


def stop_reason(output: Output, stop_token_ids: Collection[int] | None) -> str | int | None:
    """Return the stop sequence or the request's stop token that ended a text."""
    if output.reason is StopReason.STOP_SEQUENCE:
        return output.stop_sequence
    if output.reason is not StopReason.EOS_TOKEN or not output.tokens:
        return None
    token_id = output.tokens[-1].token_id
    return token_id if stop_token_ids and token_id in stop_token_ids else None
