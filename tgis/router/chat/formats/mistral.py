"""Tool calls and reasoning of Mistral models. Since version 11 of their tokenizer, only the arguments are
JSON."""

from tgis.router.chat.formats.types import JsonCall, NamedCall, ReasoningFormat, ToolFormat

MISTRAL = ToolFormat(
    "mistral",
    JsonCall(),
    in_template=("[TOOL_CALLS]",),
    section=(("[TOOL_CALLS] ", "["), ("]",)),
    between=", ",
    has_short_ids=True,
)

MISTRAL_V11 = ToolFormat(
    "mistral_v11",
    NamedCall("[ARGS]", id_mark="[CALL_ID]"),
    in_template=("[TOOL_CALLS]", "[ARGS]"),
    call=(("[TOOL_CALLS]",), ()),
    has_short_ids=True,
)

MISTRAL_REASONING = ReasoningFormat("mistral", "[THINK]", "[/THINK]", in_template=("[THINK]", "[/THINK]"))
