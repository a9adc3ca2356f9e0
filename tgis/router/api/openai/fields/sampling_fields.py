"""Defines the fields that completions and chat completions share, and reads the bodies of requests."""

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request

from tgis.config.serving import MIN_PRIORITY
from tgis.router.api.http.call_context import media_type, read_body
from tgis.router.api.http.default_sampling import DefaultFields
from tgis.router.api.http.fields.shared_fields import MAX_COUNT
from tgis.router.api.http.json_bodies import decode_body
from tgis.router.api.http.serving.origins import is_of_page
from tgis.router.api.openai.errors import ApiError, as_api_error
from tgis.router.errors import RequestError
from tgis.router.requests.parameters import MAX_PRIORITY

FORM = "application/x-www-form-urlencoded"  # default of curl and others for any body
NO_JSON_TYPE = "the content type must be application/json"
MAX_TOP_LOGPROBS = 20

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
NumTokens = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
TokenId = Annotated[int, Meta(ge=0, le=999_999_999)]
Priority = Annotated[int, Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]

T = TypeVar("T")


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(DefaultFields, kw_only=True):
    """Fields that completions and chat completions share. Ranges are checked while the body is read. A field
    of type Any is refused unless its value requests nothing."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    logit_bias: dict[str, float] | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: TopLogprobs | None = None
    cache_salt: str | None = None
    priority: Priority | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: NumTokens | None = None
    user: str | None = None

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    allowed_token_ids: Any = None
    bad_words: Any = None
    early_stopping: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    kv_transfer_params: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    structural_tag: Any = None
    use_beam_search: Any = None
    vllm_xargs: Any = None


async def read_fields(decoder: msgspec.json.Decoder[T], request: Request) -> T:
    """Return the fields in a request's body. Raises ApiError and RouterError."""
    kind = media_type(request)
    if not (kind == "" or "json" in kind or (kind == FORM and not is_of_page(request.headers))):
        raise ApiError(415, NO_JSON_TYPE)
    try:
        body = await read_body(request)
    except RequestError as error:
        raise as_api_error(error) from None
    return decode_fields(decoder, body)


def decode_fields(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Return the request in a body. Raises ApiError, which names the field and quotes no value."""
    try:
        return decode_body(decoder, body)
    except RequestError as error:
        raise as_api_error(error) from None


def check_stream_options(fields: SamplingFields) -> None:
    """Raise ApiError for stream options in a request without a stream."""
    if fields.stream_options is not None and not fields.stream:
        raise ApiError(400, "stream_options needs stream", "stream_options")
