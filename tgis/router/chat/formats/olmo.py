"""Tool calls of OLMo 3, which are lines of Python:

<function_calls>
look_up(q="text", n=1)
now()
</function_calls>"""

from tgis.router.chat.formats.types import PythonCall, ToolFormat

OLMO3 = ToolFormat(
    "olmo3",
    PythonCall(),
    in_template=("<function_calls>",),
    section=(("<function_calls>\n",), ("</function_calls>",)),
    call=((), ("\n",)),
)
