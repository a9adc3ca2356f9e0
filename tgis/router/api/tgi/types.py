"""Defines the requests and answers of TGI's API."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tgis.router.api.http.answers.text_ends import FinishReason
from tgis.router.api.http.answers.token_texts import Prefill, Token, Tokens

Signed = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
# Minima are checked with the other rules, so that 0 and negative numbers have one text.
_FROM_0 = {"minimum": 0}
Count = Annotated[int, Meta(le=2**32 - 1, extra_json_schema=_FROM_0)]
Long = Annotated[int, Meta(le=2**63 - 1, extra_json_schema=_FROM_0)]
Seed = Annotated[int, Meta(extra_json_schema=_FROM_0)]


class GenerateParameters(msgspec.Struct):
    """Parameters of a request. None means absent or null."""

    best_of: Long | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: Signed | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: Count | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: Long | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: Seed | None = None
    top_n_tokens: Count | None = None
    grammar: "GrammarField | None" = None
    adapter_id: str | None = None


class GrammarField(msgspec.Struct):
    type: Literal["json", "json_object", "json_schema", "regex"]
    value: Any


class GenerateRequest(msgspec.Struct):
    inputs: str
    parameters: GenerateParameters | None = None
    """Without parameters, the text is sampled. With parameters, they decide."""
    stream: bool | None = None
    """Used by routes that can stream or not."""


TopTokens = list[list[Token]]


class BestOfSequence(msgspec.Struct):
    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: Prefill
    tokens: Tokens
    top_tokens: TopTokens | UnsetType = UNSET


class TextDetails(msgspec.Struct):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: Prefill
    tokens: Tokens
    best_of_sequences: list[BestOfSequence] | UnsetType = UNSET
    top_tokens: TopTokens | UnsetType = UNSET


class GenerateAnswer(msgspec.Struct):
    generated_text: str
    details: TextDetails | UnsetType = UNSET


class StreamDetails(msgspec.Struct):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamEvent(msgspec.Struct):
    index: int
    """Number of the token, starting at 1."""
    token: Token
    top_tokens: Tokens | UnsetType = UNSET
    generated_text: str | None = None
    """The whole text. Only the last event has it and the details."""
    details: StreamDetails | None = None
