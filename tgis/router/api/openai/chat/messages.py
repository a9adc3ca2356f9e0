"""Converts a request's messages to the form that templates expect."""

import asyncio
from typing import Any, Protocol

import msgspec

from tgis.router.api.http.call_context import HttpCall
from tgis.router.api.http.fields.invalid_json import describe_invalid_json
from tgis.router.api.openai.chat.tools import show_tools
from tgis.router.api.openai.chat.types import Message, Tool, ToolCall
from tgis.router.api.openai.errors import ApiError, as_api_error
from tgis.router.chat.renderer import Chat, ChatRenderer
from tgis.router.errors import RequestError

MESSAGES_PER_TURN = 256  # converted in one turn of the event loop
EFFORT, TOOLS = "reasoning_effort", "tools"  # variables of templates
ROLES = ("system", "developer", "user", "assistant", "tool")

TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning")
"""Fields of messages that templates get unchanged."""


class ChatFields(Protocol):
    """Fields of a request that determine its prompt."""

    documents: list[dict[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None
    tools: list[Tool] | None
    reasoning_effort: str | None


async def render_chat(
    messages: list[Message], fields: ChatFields, renderer: ChatRenderer, http: HttpCall
) -> str:
    """Return the prompt of a request. Raises ApiError and RouterError."""
    if not messages:
        raise ApiError(400, "messages must not be empty", "messages")
    continues = bool(fields.continue_final_message)
    if continues and messages[-1].role != "assistant":
        text = "continue_final_message: the last message must be the assistant's"
        raise ApiError(400, text, "continue_final_message")
    begins = fields.add_generation_prompt
    await _check_arguments(messages, http)
    chat = Chat(
        await _template_messages(messages, renderer),
        _template_tools(fields.tools, renderer),
        documents=fields.documents,
        add_generation_prompt=not continues if begins is None else begins,
        continue_final_message=continues,
        variables=_variables(fields, renderer),
    )
    try:
        return await renderer.render(chat, http.owner)
    except RequestError as error:
        raise as_api_error(error, error.parameter or "messages") from None


async def _check_arguments(messages: list[Message], http: HttpCall) -> None:
    """Check the texts of all arguments together before any value of them is built. Raises ApiError."""
    calls = [call for message in messages for call in message.tool_calls or ()]
    texts = [call.function.arguments for call in calls if isinstance(call.function.arguments, str)]
    try:
        await http.bodies.check(f"[{','.join(texts)}]".encode(errors="replace"), http.owner)
    except RequestError as error:
        where = "the arguments of tool calls"
        log_text = f"{where}: {error.log_text}"
        raise ApiError(400, f"{where}: {error}", "messages", log_text=log_text) from None


async def _template_messages(messages: list[Message], renderer: ChatRenderer) -> list[dict[str, Any]]:
    shown = []
    for index, message in enumerate(messages):
        if index % MESSAGES_PER_TURN == MESSAGES_PER_TURN - 1:
            await asyncio.sleep(0)
        shown.append(_template_message(message, index, renderer))
    return shown


def _template_tools(tools: list[Tool] | None, renderer: ChatRenderer) -> list[dict[str, Any]] | None:
    shown = show_tools(tools)
    return shown if renderer.reads(TOOLS) else None


def _variables(fields: ChatFields, renderer: ChatRenderer) -> dict[str, Any] | None:
    """Return further variables for the template."""
    effort = fields.reasoning_effort
    variables = fields.chat_template_kwargs
    if effort is None:
        return variables
    if renderer.reads(EFFORT):
        return {EFFORT: effort} | (variables or {})
    if effort != "none":
        raise ApiError(400, f"{EFFORT} is not supported. The chat template does not read it.", EFFORT)
    return variables


def _template_message(message: Message, index: int, renderer: ChatRenderer) -> dict[str, Any]:
    where = f"messages[{index}]"
    role = message.role
    if role not in ROLES:
        raise ApiError(400, f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    if role == "developer" and not renderer.takes_developer_role:
        role = "system"
    if message.content is None and role != "assistant":
        raise ApiError(400, f"{where}.content is required", f"{where}.content")
    shown: dict[str, Any] = {"role": role, "content": _content(message, where, renderer.takes_content_parts)}
    for name in TEXTS:
        if (text := getattr(message, name)) is not None:
            shown[name] = text
    if message.tool_calls:
        shown["tool_calls"] = [_tool_call(call, where) for call in message.tool_calls]
    return shown


def _content(message: Message, where: str, as_parts: bool) -> str | list[dict[str, str]]:
    if isinstance(message.content, str) or message.content is None:
        text = message.content or ""
        return [{"type": "text", "text": text}] if as_parts else text
    texts = []
    for part in message.content:
        if part.type != "text":
            kind = part.type if part.type.isidentifier() and len(part.type) <= 32 else "its type"
            text = f"{where}: parts must be text"
            raise ApiError(400, f"{text}; {kind} is not supported", "messages", log_text=text)
        if part.text is None:
            raise ApiError(400, f"{where}: a part has no text", "messages")
        texts.append(part.text)
    return [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)


def _tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = describe_invalid_json(error, arguments.encode(errors="replace"))
            text = f"{where}: the arguments of a tool call are not valid JSON: {reason}"
            raise ApiError(400, text, "messages") from None
        except RecursionError:
            text = f"{where}: the arguments of a tool call are nested too deeply"
            raise ApiError(400, text, "messages") from None
    function = {"name": call.function.name, "arguments": arguments or {}}
    return {"id": call.id, "type": call.type, "function": function}
