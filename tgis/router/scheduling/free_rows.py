"""Tracks the free rows of the shards' row tables. Every running sequence has one row."""

from tgis.router.metrics.resource_counts import ResourceCount


class FreeRows:
    """Free and closed rows. A closed row can be reused at once, because the next step first closes it in the
    shards and then opens it."""

    def __init__(self, num_rows: int) -> None:
        self.resource_count = ResourceCount()
        self._free = list(range(num_rows))[::-1]
        self._closed: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        self.resource_count.created += 1
        return self._free.pop()

    def close(self, row: int) -> None:
        self.resource_count.released += 1
        self._closed.append(row)
        self._free.append(row)

    def take_closed(self) -> list[int]:
        """Return the rows that were closed since the last call. The caller must send them to the shards."""
        closed = self._closed
        self._closed = []
        return closed
