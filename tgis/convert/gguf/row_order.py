"""Defines orders of rows in GGUF files that differ from those in checkpoints."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class RowOrder(Protocol):
    def index(self, num_rows: int) -> NDArray[np.int64]:
        """Return the file's row for each row of the checkpoint. Raises ValueError if the number does not
        fit."""


@dataclass(frozen=True)
class AdjacentPairs:
    """Order in which channels that are rotated together are adjacent; in checkpoints, they are half a head
    apart."""

    num_heads: int

    def index(self, num_rows: int) -> NDArray[np.int64]:
        rows = np.arange(num_rows).reshape(self.num_heads, -1, 2)
        return rows.swapaxes(1, 2).reshape(-1)


@dataclass(frozen=True)
class SplitGroups:
    """Order of all queries, all keys and all values; in checkpoints, the queries of a group precede the key
    and value that they share."""

    num_heads: int
    num_groups: int

    def index(self, num_rows: int) -> NDArray[np.int64]:
        num_queries = self.num_heads // self.num_groups
        rows = np.arange(num_rows).reshape(self.num_heads + 2 * self.num_groups, -1)
        queries = rows[: self.num_heads].reshape(self.num_groups, num_queries, -1)
        keys, values = rows[self.num_heads :].reshape(2, self.num_groups, 1, -1)
        return np.concatenate([queries, keys, values], axis=1).reshape(-1)
