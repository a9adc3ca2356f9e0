"""Required tool calls of a model whose own format is unknown. Only the grammar makes the model write them."""

from tgis.router.chat.formats.types import JsonCall, ToolFormat

JSON_LIST = ToolFormat(
    "json_list",
    JsonCall(arguments_key="parameters"),
    in_template=(),
    section=(("[",), ("]",)),
    between=", ",
)
