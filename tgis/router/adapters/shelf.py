"""The room that shards have for loaded contents of one kind, and the contents in it, or on their way."""

import asyncio
from dataclasses import dataclass, field

from tgis.router.metrics.metrics import ContentMetrics
from tgis.router.sequence import Content


@dataclass(eq=False)
class Resident:
    """A content in the shards, or on its way there."""

    content: Content
    num_references: int = 0
    has_room: bool = False
    """Its bytes are counted."""
    is_loaded: bool = False
    loading: "asyncio.Task[None]" = field(init=False)

    @property
    def is_idle(self) -> bool:
        return self.is_loaded and not self.num_references


@dataclass(eq=False)
class Shelf:
    """All numbers are bytes."""

    metrics: ContentMetrics
    limit_s: float
    capacity: int = 0
    num_bytes: int = 0
    """Of all that has room; that of what is leaving ends when it is gone."""
    num_leaving: int = 0
    num_promised: int = 0
    """To the one that others make way for."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one that others make way for: first come, first served."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def fits(self, num_bytes: int) -> bool:
        """Nobody need make way, and nothing of it is promised."""
        later = self.num_bytes - self.num_leaving + self.num_promised
        return max(self.num_bytes, later) + num_bytes <= self.capacity

    def add(self, resident: Resident) -> None:
        resident.has_room = True
        self.num_bytes += resident.content.num_bytes

    def remove(self, resident: Resident) -> None:
        resident.has_room = False
        self.num_bytes -= resident.content.num_bytes
        self.changed.set()
