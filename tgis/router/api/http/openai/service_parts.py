"""Parts of the router that the handlers of OpenAI's API use."""

from dataclasses import dataclass

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
    adapter_roots: tuple[str, ...] | None = None
    """Directories in which adapters are found, first come first; None if clients may not name adapters."""
