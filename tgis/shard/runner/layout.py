"""The layout of several sequences' positions packed along one axis."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


class Layout(NamedTuple):
    """Packed positions of several sequences, sequence after sequence."""

    begins: Integers  # [num_seqs + 1], index of each sequence's first position, then the total
    sequence: Integers  # [num_tokens]
    positions: Integers  # [num_tokens]

    @classmethod
    def of(cls, starts: Integers, ends: Integers) -> "Layout":
        """Lay out the positions [start, end) of each sequence; a range may be empty."""
        counts = ends - starts
        if (counts == 1).all():
            numbers = np.arange(len(counts) + 1)
            return cls(numbers, numbers[:-1], starts)
        begins = np.concatenate([[0], np.cumsum(counts)])
        sequence = np.repeat(np.arange(len(counts)), counts)
        return cls(begins, sequence, np.arange(len(sequence)) + (starts - begins[:-1])[sequence])
