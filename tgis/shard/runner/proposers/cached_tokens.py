"""Counts the tokens of rows that a speculator's own cache holds. It has the served model's blocks."""

import numpy as np

from tgis.shard.runner.row_table import Integers, RowTable


class CachedTokens:
    """Numbers of tokens of rows in a cache, and the blocks of which it holds all tokens.

    Rows that share blocks share the keys and values of all models. A block may lack those of a speculator,
    which may compute tokens later than the served model, or never."""

    def __init__(self, table: RowTable, num_blocks: int):
        self._table = table
        num_rows = len(table.rows)
        self.counts = np.zeros(num_rows, np.int64)  # tokens of each row
        self._num_blocks = np.zeros(num_rows, np.int64)  # blocks that `see_blocks` has seen
        self._is_filled = np.zeros(num_blocks, np.bool_)

    def reset(self) -> None:
        self.open_rows(np.arange(len(self.counts)))
        self._is_filled[:] = False

    def open_rows(self, rows: Integers) -> None:
        self.counts[rows] = self._num_blocks[rows] = 0

    def advance(self, rows: Integers, ends: Integers) -> None:
        """Set the number of tokens of rows that are in the cache."""
        size = self._table.block_size
        firsts = self.counts[rows] // size
        lasts = ends // size
        for i in (lasts > firsts).nonzero()[0].tolist():
            self._is_filled[self._table.block_tables[rows[i], firsts[i] : lasts[i]]] = True
        self.counts[rows] = ends

    def see_blocks(self, rows: Integers, starts: Integers) -> Integers:
        """Note the blocks that rows have got. The first ones of a new row, before the start of its work, are
        from the prefix cache; all others have other contents than before. Return the rows that begin with
        blocks of the prefix cache."""
        size = self._table.block_size
        counts = self._table.num_blocks[rows]
        sharing = []
        for i in (counts > self._num_blocks[rows]).nonzero()[0].tolist():
            row, first = rows[i], self._num_blocks[rows[i]]
            blocks = self._table.block_tables[row, : counts[i]]
            if first == 0 and (first := starts[i] // size):
                is_filled = self._is_filled[blocks[:first]]
                num_filled = first if is_filled.all() else is_filled.argmin()
                self.counts[row] = num_filled * size
                sharing.append(row)
            self._is_filled[blocks[first:]] = False
            self._num_blocks[row] = counts[i]
        return np.array(sharing, np.int64)
