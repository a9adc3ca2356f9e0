"""Tool calls and reasoning of Granite 3."""

from tgis.router.chat.formats.types import JsonCall, ReasoningFormat, ToolFormat

GRANITE = ToolFormat(
    "granite",
    JsonCall(),
    in_template=("<|tool_call|>",),
    section=(("<|tool_call|>", "["), ("]",)),
    between=", ",
)

GRANITE_REASONING = ReasoningFormat(
    "granite",
    "Here is my thought process:",
    "Here is my response:",
    in_template=("Here is my thought process:", "Here is my response:"),
)
