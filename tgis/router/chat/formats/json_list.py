"""Calls that are demanded of a model whose own form of them is not known. The grammar alone makes it write
them."""

from tgis.router.chat.formats.types import JsonCall, ToolFormat

JSON_LIST = ToolFormat(
    "json_list",
    JsonCall(arguments_key="parameters"),
    in_template=(),
    section=(("[",), ("]",)),
    between=", ",
)
