"""Reads a text, in parts of any size, as the pieces of an answer."""

from collections.abc import Set

from tgis.router.chat.answers.pieces import ContentText, Piece
from tgis.router.chat.formats.types import ReasoningFormat, ToolFormat


class AnswerParser:
    """Parser of one answer. The joined pieces do not depend on how the text is split into parts."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        begins_in_reasoning: bool = False,
        tools: ToolFormat | None = None,
        names: Set[str] = frozenset(),
    ) -> None:
        """Create a parser. Without a format, its marks are content. `begins_in_reasoning` says that the
        prompt has begun the reasoning. Calls of functions whose name is not in `names` are content."""
        self.is_reasoning = begins_in_reasoning
        """True until the reasoning has ended."""

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that are certain once `text` has come."""
        return [ContentText(text)]

    def flush(self) -> list[Piece]:
        """Return the rest of the pieces, because the text ends here."""
        return []
