"""Tool calls of Phi-4-mini, in the two formats that prompts request."""

from tgis.router.chat.formats.types import JsonCall, ToolFormat

PHI4 = ToolFormat(
    "phi4",
    JsonCall(),
    in_template=("<|tool|>", "<|/tool|>"),
    section=(("<|tool_call|>", "["), ("]", "<|/tool_call|>")),
    between=", ",
)

PHI4_FUNCTOOLS = ToolFormat(
    "phi4_functools",
    JsonCall(),
    in_template=("functools[",),
    section=(("functools[",), ("]",)),
    between=", ",
    other_names=("phi4_mini_json",),
)
