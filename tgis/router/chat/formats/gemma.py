"""Tool calls and reasoning of Gemma 4. Models write arguments with bare keys, and texts between marks:

<|channel>thought
reasoning<channel|>content<|tool_call>call:look_up{q:<|"|>text<|"|>,n:[1,true]}<tool_call|>"""

from tgis.router.chat.formats.types import LooseCall, ReasoningFormat, ToolFormat

GEMMA4 = ToolFormat(
    "gemma4",
    LooseCall(quote='<|"|>'),
    in_template=("<|tool_call>",),
    call=(("<|tool_call>", "call:"), ("<tool_call|>",)),
)

GEMMA4_REASONING = ReasoningFormat(
    "gemma4", "<|channel>", "<channel|>", in_template=("<|channel>", "<channel|>"), label="thought"
)
