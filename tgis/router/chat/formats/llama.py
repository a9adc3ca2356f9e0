"""Tool calls of Llama 3.1 and later, and of OLMo 3. If the prompt requests it, Llama 3.2 and 4 write calls
like Python:

[look_up(q="text", n=1), now()]

OLMo 3 writes such calls as lines:

<function_calls>
look_up(q="text", n=1)
now()
</function_calls>"""

from tgis.router.chat.formats.types import JsonCall, PythonCall, ToolFormat

LLAMA3 = ToolFormat(
    "llama3",
    JsonCall(arguments_key="parameters"),
    in_template=("ipython", '"parameters": '),
    between="; ",
    optional_mark="<|python_tag|>",
    other_names=("llama3_json", "llama4_json"),
)

PYTHONIC = ToolFormat(
    "pythonic",
    PythonCall(),
    in_template=("[func_name1(",),
    section=(("[",), ("]",)),
    between=", ",
    optional_mark="<|python_start|>",
    is_whole_answer=True,
    other_names=("llama4_pythonic",),
)

OLMO3 = ToolFormat(
    "olmo3",
    PythonCall(),
    in_template=("<function_calls>",),
    section=(("<function_calls>\n",), ("</function_calls>",)),
    call=((), ("\n",)),
)
