"""Defines the requests and answers of `/v1/chat/completions`."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tgis.router.api.openai.answers.logprobs import ChatLogprobs, PromptLogprobs
from tgis.router.api.openai.answers.usage import SYSTEM_FINGERPRINT, Usage
from tgis.router.api.openai.fields.sampling_fields import Count, NumTokens, SamplingFields, TopLogprobs


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: str | None = None
    type: str = "function"


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Same as `reasoning_content`, under its newer name."""


_FUNCTION = {
    "properties": {
        "name": {"type": "string"},
        "description": {"type": "string"},
        "parameters": {"type": "object"},
        "strict": {"type": "boolean"},
    },
    "required": ["name"],
}


class Tool(msgspec.Struct):
    function: Annotated[dict[str, Any], Meta(extra_json_schema=_FUNCTION)]
    type: str = "function"


class FunctionName(msgspec.Struct):
    name: str


class ToolName(msgspec.Struct):
    function: FunctionName
    type: str = "function"


class AllowedTools(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[ToolName]


class ToolChoice(msgspec.Struct):
    type: str
    function: FunctionName | None = None
    """Function to call, if the type is `function`."""
    allowed_tools: AllowedTools | None = None
    """Functions that the answer may call, if the type is `allowed_tools`."""


class ChatRequest(SamplingFields, kw_only=True):
    messages: list[Message]
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    """Has precedence over `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    max_reasoning_tokens: Count | None = None
    reasoning_effort: str | None = None

    audio: Any = None
    best_of: Any = None
    chat_template: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    mm_processor_kwargs: Any = None
    modalities: Any = None
    prediction: Any = None
    store: Any = None
    suffix: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class AnswerFunction(msgspec.Struct):
    name: str
    arguments: str


class AnswerCall(msgspec.Struct):
    id: str
    function: AnswerFunction
    type: str = "function"


class AnswerMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str = "default"
    system_fingerprint: str = SYSTEM_FINGERPRINT
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: tuple[int, ...] | None = None


class FunctionDelta(msgspec.Struct):
    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(msgspec.Struct):
    """Part of a call. The first part has an id and a name, the others have arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: str = "default"
    system_fingerprint: str = SYSTEM_FINGERPRINT
