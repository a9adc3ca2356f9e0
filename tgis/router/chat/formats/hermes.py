"""Tool calls between `<tool_call>` and `</tool_call>`. Hermes, Qwen 2.5 and 3, and Granite 4 write JSON.
In other models, the arguments are between tags. GLM 4.5 writes

<tool_call>look_up
<arg_key>q</arg_key>
<arg_value>text</arg_value>
</tool_call>

and Qwen3-Coder and Qwen 3.5 write

<tool_call>
<function=look_up>
<parameter=q>
text
</parameter>
</function>
</tool_call>"""

from tgis.router.chat.formats.types import JsonCall, TaggedCall, ToolFormat

HERMES = ToolFormat(
    "hermes",
    JsonCall(),
    in_template=("<tool_call>", '"arguments": '),
    call=(("<tool_call>\n",), ("\n</tool_call>",)),
    between="\n",
)

GLM45 = ToolFormat(
    "glm45",
    TaggedCall("\n", "<arg_key>", "</arg_key>\n", "<arg_value>", "</arg_value>\n"),
    in_template=("<tool_call>", "<arg_key>", "<arg_value>"),
    call=(("<tool_call>",), ("</tool_call>",)),
    between="\n",
)

QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    TaggedCall(">\n", "<parameter=", ">\n", "", "\n</parameter>\n"),
    in_template=("<tool_call>", "<function=", "<parameter="),
    call=(("<tool_call>\n", "<function="), ("</function>\n", "</tool_call>")),
    between="\n",
    other_names=("qwen3_xml",),
)
