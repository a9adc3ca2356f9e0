"""Limits how many inputs are in the server at once."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from tgis.router.errors import OVERLOADED, OverloadedError
from tgis.router.metrics.resource_counts import Tally


class Permits:
    """Concurrency limit. An RPC gets permits for all its inputs at once, or is refused at once; no RPC waits
    for a permit."""

    def __init__(self, max_permits: int) -> None:
        self.num_free = self.max_permits = max_permits
        self.tally = Tally()
        self.all_free = asyncio.Event()
        self.all_free.set()

    @property
    def num_used(self) -> int:
        return self.max_permits - self.num_free

    @contextmanager
    def hold(self, count: int) -> Iterator[None]:
        """Hold `count` permits while the context is open. Raises OverloadedError."""
        if count > self.num_free:
            raise OverloadedError(OVERLOADED)
        self.num_free -= count
        self.tally.created += count
        self.all_free.clear()
        try:
            yield
        finally:
            self.num_free += count
            self.tally.released += count
            if not self.num_used:
                self.all_free.set()
