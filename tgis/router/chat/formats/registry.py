"""Lists all formats, and chooses those of the served model."""

from typing import NamedTuple

from tgis.router.chat.formats.types import ReasoningFormat, ToolFormat

TOOL_FORMATS: tuple[ToolFormat, ...] = ()
"""The first whose texts a template has is the model's."""
REASONING_FORMATS: tuple[ReasoningFormat, ...] = ()


class ChatFormats(NamedTuple):
    """Formats of the served model; None where it has none, or none is known."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
