"""Tool calls of DeepSeek models. Version 3 writes the arguments in a fenced code block."""

from tgis.router.chat.formats.types import NamedCall, ToolFormat

_SECTION = (("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁end｜>",))
_BEGIN = "<｜tool▁call▁begin｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_END = "<｜tool▁call▁end｜>"

DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",
    NamedCall("\n```json\n"),
    in_template=(_BEGIN, _SEPARATOR, "```json"),
    section=_SECTION,
    call=((_BEGIN, "function", _SEPARATOR), ("\n```", _END)),
    between="\n",
)

DEEPSEEK_V31 = ToolFormat(
    "deepseek_v31",
    NamedCall(_SEPARATOR),
    in_template=(_BEGIN, _SEPARATOR),
    section=_SECTION,
    call=((_BEGIN,), (_END,)),
)
