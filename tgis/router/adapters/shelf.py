"""Room that the shards have for adapters of one kind, and the adapters that take it."""

import asyncio
from dataclasses import dataclass, field

from tgis.router.metrics.metrics import AdapterMetrics
from tgis.router.sequence import Content


@dataclass(eq=False)
class Resident:
    """Adapter that the shards have loaded or are loading."""

    content: Content
    num_references: int = 0
    has_room: bool = False
    """True if its bytes are counted."""
    is_loaded: bool = False
    loading: "asyncio.Task[None]" = field(init=False)

    @property
    def is_idle(self) -> bool:
        return self.is_loaded and not self.num_references


@dataclass(eq=False)
class Shelf:
    """Room for adapters of one kind. All sizes are bytes."""

    metrics: AdapterMetrics
    limit_s: float
    capacity: int = 0
    num_bytes: int = 0
    """Bytes of all adapters that have room. An adapter that is being unloaded counts until it is gone."""
    num_leaving: int = 0
    num_promised: int = 0
    """Bytes promised to the adapter that others are being evicted for."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock of the adapter that others are being evicted for: first come, first served."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def fits(self, num_bytes: int) -> bool:
        """Return whether that many bytes fit without an eviction and without using promised room."""
        later = self.num_bytes - self.num_leaving + self.num_promised
        return max(self.num_bytes, later) + num_bytes <= self.capacity

    def add(self, resident: Resident) -> None:
        resident.has_room = True
        self.num_bytes += resident.content.num_bytes

    def remove(self, resident: Resident) -> None:
        resident.has_room = False
        self.num_bytes -= resident.content.num_bytes
        self.changed.set()
