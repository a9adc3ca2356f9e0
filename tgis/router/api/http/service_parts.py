"""Collects the parts of the router that the handlers of HTTP APIs use."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tgis.config.processes import RouterConfig
from tgis.router.api.http.openapi import ErrorTexts, Operation
from tgis.router.api.models import Models
from tgis.router.api.service import GenerationService
from tgis.router.chat.formats.registry import ChatFormats
from tgis.router.chat.renderer import ChatRenderer
from tgis.router.grammar.answer_rules import Mark
from tgis.router.metrics.engine_load import EngineLoad
from tgis.router.requests.validation import RequestLimits
from tgis.router.text.detokenizer import Vocabulary
from tgis.router.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServiceParts:
    service: GenerationService
    renderer: ChatRenderer
    models: Models
    vocabulary: Vocabulary
    """Vocabulary for texts that continue their input."""
    limits: RequestLimits
    tokenizer: Tokenizer
    formats: ChatFormats
    """Formats of the model's tool calls and reasoning."""
    config: RouterConfig
    is_ready: Callable[[], bool]
    adapter_roots: tuple[str, ...] | None = None
    """Directories searched for adapters, in order; None if clients may not name adapters."""
    load: Callable[[], Awaitable[EngineLoad]] = field(kw_only=True)
    """Function that returns how busy the engine is, or was a moment ago."""
    watching: Callable[[], AbstractContextManager[asyncio.Event]] = field(kw_only=True)
    """Function whose context counts a client that watches the health. It yields the event of a drain, after
    which such clients have time to choose another server."""
    encoding_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that long answers take in turn to be encoded."""
    operations: list[tuple[Operation, ErrorTexts]] = field(default_factory=list)
    """Operations of all served APIs for the OpenAPI document. Complete once all APIs are built."""

    def find_mark(self, text: str) -> Mark:
        """Return the mark with this text. Its token is the one that spells the whole text."""
        token_id = self.tokenizer.added_token_id(text)
        return Mark(text, token_id, token_id in self.tokenizer.special_ids)
