"""Limits the number of inputs that the server handles at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from tgis.router.errors import OVERLOADED, OverloadedError
from tgis.router.metrics.resource_counts import ResourceCount


class ConcurrencyLimit:
    """Limit on concurrent inputs. It admits all inputs of a call or refuses the call; no call waits."""

    def __init__(self, limit: int) -> None:
        self.num_free = self.limit = limit
        self.resource_count = ResourceCount()

    @property
    def num_used(self) -> int:
        return self.limit - self.num_free

    @contextmanager
    def acquire(self, count: int, is_again: bool = False) -> Iterator[None]:
        """Admit `count` inputs while the context is open. With `is_again`, ignore the limit, because the call
        has been admitted before. Raises OverloadedError."""
        if count > max(self.num_free, 0) and not is_again:
            raise OverloadedError(OVERLOADED)
        self.num_free -= count
        self.resource_count.created += count
        try:
            yield
        finally:
            self.num_free += count
            self.resource_count.released += count
