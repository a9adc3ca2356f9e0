"""Tool calls of Hermes, Qwen 2.5 and 3, and Granite 4."""

from tgis.router.chat.formats.types import JsonCall, ToolFormat

HERMES = ToolFormat(
    "hermes",
    JsonCall(),
    in_template=("<tool_call>", '"arguments": '),
    call=(("<tool_call>\n",), ("\n</tool_call>",)),
    between="\n",
)
