"""Tool calls of Llama 3.1 and later."""

from tgis.router.chat.formats.types import JsonCall, ToolFormat

LLAMA3 = ToolFormat(
    "llama3",
    JsonCall(arguments_key="parameters"),
    in_template=("ipython", '"parameters": '),
    between="; ",
    optional_mark="<|python_tag|>",
    other_names=("llama3_json", "llama4_json"),
)
