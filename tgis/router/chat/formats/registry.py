"""Lists all formats and chooses the formats of the served model."""

from typing import NamedTuple, TypeVar

from tgis.router.chat.formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32
from tgis.router.chat.formats.gemma import GEMMA4, GEMMA4_REASONING
from tgis.router.chat.formats.granite import GRANITE, GRANITE_REASONING
from tgis.router.chat.formats.harmony import HARMONY, HARMONY_REASONING
from tgis.router.chat.formats.hermes import GLM45, HERMES, QWEN3_CODER
from tgis.router.chat.formats.llama import LLAMA3, OLMO3, PYTHONIC
from tgis.router.chat.formats.mistral import MISTRAL, MISTRAL_REASONING, MISTRAL_V11
from tgis.router.chat.formats.phi import PHI4, PHI4_FUNCTOOLS
from tgis.router.chat.formats.think import THINK
from tgis.router.chat.formats.types import ReasoningFormat, ToolFormat
from tgis.router.errors import StartupError

AUTO = "auto"
NONE = "none"
TOOL_FORMATS = (
    DEEPSEEK_V32,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    MISTRAL_V11,
    MISTRAL,
    PHI4_FUNCTOOLS,
    PHI4,
    GEMMA4,
    HARMONY,
    GLM45,
    QWEN3_CODER,
    HERMES,
    GRANITE,
    OLMO3,
    PYTHONIC,
    LLAMA3,
)
"""Tool formats in order of precedence: the first one whose texts are in the template is used."""
REASONING_FORMATS = (MISTRAL_REASONING, GEMMA4_REASONING, HARMONY_REASONING, GRANITE_REASONING, THINK)

_Format = TypeVar("_Format", bound=ToolFormat | ReasoningFormat)


class ChatFormats(NamedTuple):
    """Formats of the served model; None for a format that is unknown or does not exist."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None


def choose_formats(template_text: str | None, tool_parser: str, reasoning_parser: str) -> ChatFormats:
    """Return the formats that the options name, or that are detected in the template.

    Raises StartupError for an unknown name."""
    return ChatFormats(
        _choose(TOOL_FORMATS, template_text, tool_parser, "--tool-call-parser"),
        _choose(REASONING_FORMATS, template_text, reasoning_parser, "--reasoning-parser"),
    )


def _choose(formats: tuple[_Format, ...], template_text: str | None, name: str, flag: str) -> _Format | None:
    if name == NONE:
        return None
    if name == AUTO:
        text = template_text or ""
        return next((each for each in formats if all(part in text for part in each.in_template)), None)
    matches = [each for each in formats if name in (each.name, *each.other_names)]
    if not matches:
        known = ", ".join((AUTO, NONE, *(each.name for each in formats)))
        raise StartupError(f"{flag} {name} is not known; it may be one of {known}")
    return matches[0]
