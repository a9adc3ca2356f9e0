"""Reads the tools of a request, and its choice of the tools that the answer may or must call."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from tgis.router.api.openai.chat.types import Tool, ToolChoice
from tgis.router.api.openai.errors import ApiError

MAX_TOOLS = 128
FUNCTION = "function"
NONE, AUTO, REQUIRED = MODES = ("none", "auto", "required")
# Keys of a function in the order of the models' training data. The client's order would change the prompt.
SHOWN_FIRST = ("name", "description", "parameters")
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

_NAME = re.compile("[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Function:
    name: str
    schema: str
    """JSON schema of the arguments."""
    is_strict: bool
    """True if the whole schema must be enforced. Otherwise its unsupported parts are ignored."""
    field: str
    """Field of the request that has the schema."""


@dataclass(frozen=True)
class ToolUse:
    """Functions that an answer may call or must call."""

    functions: tuple[Function, ...]
    is_required: bool
    is_named: bool
    """True if the client has chosen the function."""
    allows_several: bool


class _Choice(NamedTuple):
    mode: str
    names: tuple[str, ...] | None = None
    """Functions that may be called; None for all."""
    is_named: bool = False


def show_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Return the tools as templates expect them, or None if there are none. Raises ApiError."""
    if not tools:
        return None
    _check_all(tools)
    return [{"type": FUNCTION, FUNCTION: _show(tool.function)} for tool in tools]


def read_tool_use(
    tools: list[Tool] | None, tool_choice: str | ToolChoice | None, parallel: bool | None
) -> ToolUse | None:
    """Return the tool use that a request allows or requires, or None for no tools. Raises ApiError."""
    choice = _read_choice(tool_choice)
    if not tools:
        if choice.mode == REQUIRED or choice.names is not None:
            raise ApiError(400, "tool_choice needs tools", "tool_choice")
        return None
    _check_all(tools)
    read = [_read_function(tool.function, index) for index, tool in enumerate(tools)]
    functions = {function.name: function for function in read}
    names = tuple(functions) if choice.names is None else choice.names
    if not functions.keys() >= set(names):
        raise ApiError(400, "tool_choice has the name of a function that tools lack", "tool_choice")
    if choice.mode == NONE:
        return None
    return ToolUse(
        tuple(functions[name] for name in names),
        is_required=choice.mode == REQUIRED,
        is_named=choice.is_named,
        allows_several=parallel is not False and not choice.is_named,
    )


def _check_all(tools: list[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise ApiError(400, f"tools must have at most {MAX_TOOLS} functions", "tools")
    for index, tool in enumerate(tools):
        _check(tool, f"tools[{index}]")
    if len({tool.function["name"] for tool in tools}) < len(tools):
        raise ApiError(400, "tools: functions must have different names", "tools")


def _check(tool: Tool, where: str) -> None:
    function = tool.function
    name, parameters = function.get("name"), function.get("parameters")
    if tool.type != FUNCTION:
        raise ApiError(400, f"{where}: type must be {FUNCTION}", "tools")
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        text = f"{where}: a function's name must be 1 to 64 letters, digits and characters of _.-"
        raise ApiError(400, text, "tools")
    if not isinstance(function.get("description"), str | None):
        raise ApiError(400, f"{where}: description must be a text", "tools")
    if not isinstance(function.get("strict"), bool | None):
        raise ApiError(400, f"{where}: strict must be true or false", "tools")
    if not isinstance(parameters, dict | None):
        raise ApiError(400, f"{where}: parameters must be an object, the schema of an object", "tools")
    if parameters and parameters.get("type", "object") != "object":
        raise ApiError(400, f"{where}: parameters must be the schema of an object", "tools")


def _show(function: dict[str, Any]) -> dict[str, Any]:
    present = {key: value for key, value in function.items() if value is not None and key != "strict"}
    present.setdefault("parameters", NO_PARAMETERS)
    first = {key: present[key] for key in SHOWN_FIRST if key in present}
    return first | present


def _read_function(function: dict[str, Any], index: int) -> Function:
    parameters = function.get("parameters")
    schema = {**NO_PARAMETERS, "additionalProperties": False} if parameters is None else parameters
    encoded = msgspec.json.encode({"type": "object"} | schema).decode()
    is_strict = function.get("strict") is True
    return Function(function["name"], encoded, is_strict, f"tools[{index}].function.parameters")


def _read_choice(choice: str | ToolChoice | None) -> _Choice:
    if choice is None:
        return _Choice(AUTO)
    if isinstance(choice, str):
        if choice not in MODES:
            raise ApiError(400, f"tool_choice must be {', '.join(MODES)} or an object", "tool_choice")
        return _Choice(choice)
    if choice.type == FUNCTION and choice.function is not None:
        return _Choice(REQUIRED, (choice.function.name,), is_named=True)
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        allowed = choice.allowed_tools
        if allowed.tools and all(tool.type == FUNCTION for tool in allowed.tools):
            names = tuple(dict.fromkeys(tool.function.name for tool in allowed.tools))
            return _Choice(allowed.mode, names)
    text = "tool_choice: an object must name a function, or be allowed_tools with functions"
    raise ApiError(400, text, "tool_choice")
