"""Tool calls of DeepSeek models. Version 3 writes the arguments in a fenced code block, version 3.1 as JSON,
and version 3.2 between tags that show which values are texts:

<｜DSML｜function_calls>
<｜DSML｜invoke name="look_up">
<｜DSML｜parameter name="q" string="true">text</｜DSML｜parameter>
<｜DSML｜parameter name="n" string="false">1</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>"""

from tgis.router.chat.formats.types import NamedCall, TaggedCall, ToolFormat

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

DEEPSEEK_V32 = ToolFormat(
    "deepseek_v32",
    TaggedCall(
        '">\n',
        '<｜DSML｜parameter name="',
        '" string="false">',
        "",
        "</｜DSML｜parameter>\n",
        text_key_end='" string="true">',
    ),
    in_template=("｜DSML｜", "function_calls", "invoke"),
    section=(("<｜DSML｜function_calls>\n",), ("</｜DSML｜function_calls>",)),
    call=(('<｜DSML｜invoke name="',), ("</｜DSML｜invoke>\n",)),
)
