"""Parts of the router that the handlers of OpenAI's API use."""

import asyncio
from dataclasses import dataclass, field

from tgis.router.api.openai.models import Models
from tgis.router.api.service import GenerationService
from tgis.router.chat.formats.registry import ChatFormats
from tgis.router.chat.renderer import ChatRenderer
from tgis.router.grammar.answer_rules import Mark
from tgis.router.requests.validation import RequestLimits
from tgis.router.text.detokenizer import Vocabulary
from tgis.router.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class OpenAiApi:
    service: GenerationService
    renderer: ChatRenderer
    models: Models
    vocabulary: Vocabulary
    """Vocabulary of texts that continue their input."""
    limits: RequestLimits
    tokenizer: Tokenizer
    formats: ChatFormats
    """Formats in which the model calls tools and reasons."""
    adapter_roots: tuple[str, ...] | None = None
    """Directories in which adapters are found, first come first; None if clients may not name adapters."""
    encoding_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Turn of the answer that is encoded; long ones take turns."""

    def find_mark(self, text: str) -> Mark:
        """Return the mark of a text, with the token that is the whole text."""
        token_id = self.tokenizer.added_token_id(text)
        return Mark(text, token_id, token_id in self.tokenizer.special_ids)
