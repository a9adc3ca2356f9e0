"""Defines the requests and answers of `/v1/completions`."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tgis.router.api.http.fields.shared_fields import MAX_COUNT
from tgis.router.api.openai.answers.logprobs import CompletionLogprobs, PromptLogprobs
from tgis.router.api.openai.answers.usage import SYSTEM_FINGERPRINT, Usage
from tgis.router.api.openai.fields.sampling_fields import SamplingFields, TokenId, TopLogprobs


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    max_tokens: Annotated[int, Meta(le=MAX_COUNT, extra_json_schema={"minimum": 0})] | None = None
    """Its minimum depends on `echo` and `prompt_logprobs`, so it is checked with them."""
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    suffix: Any = None
    prompt_embeds: Any = None


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    token_ids: list[int] | None = None


class Completion(msgspec.Struct, kw_only=True):
    """Whole answer, or one chunk of a streamed answer."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str = SYSTEM_FINGERPRINT
