"""Parts of the router that the handlers of OpenAI's API use."""

import asyncio
from dataclasses import dataclass, field

from tgis.router.api.http.openai.models import Models
from tgis.router.api.service import GenerationService
from tgis.router.chat.renderer import ChatRenderer
from tgis.router.requests.validation import RequestLimits
from tgis.router.text.detokenizer import Vocabulary


@dataclass(frozen=True)
class OpenAiApi:
    service: GenerationService
    renderer: ChatRenderer
    models: Models
    vocabulary: Vocabulary
    """Vocabulary of texts that continue their input."""
    limits: RequestLimits
    encoding_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Turn of the answer that is encoded; long ones take turns."""
