"""Free rows of the shards' row tables. Every running sequence has one row."""

from tgis.router.metrics.resource_counts import ResourceCount


class FreeRows:
    """Free and closed rows. A closed row may be taken again at once, because the next step tells the shards
    of both, in that order."""

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
        """Return the closed rows that the shards have not been told of, for the caller to tell them."""
        closed, self._closed = self._closed, []
        return closed
